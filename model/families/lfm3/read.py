"""LFM3 in its Hugging Face layout, and its keys. llama.cpp has no such architecture: no GGUF."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from model.families.lfm2 import read as lfm2_read
from model.families.lfm3.config import Lfm3Config
from model.files import ConfigError
from model.foreign.config import ForeignConfig, read_decoder
from model.foreign.hybrid_names import FOLDER_ATTENTION, HybridNames, inside, weights_of
from model.foreign.layer_kinds import layer_kinds, layers_of
from model.foreign.weights import Part, Renamed, Weights

#: The gate of heads in files; transformers' own name of it is `OWN_GATE`.
GATE, OWN_GATE = "gate_proj", "g_proj"


def folder_names(gate: str = GATE) -> HybridNames:
    """The keys of files that call the gate of heads so."""
    norms = {"mixer_post_norm": "post_operator_norm", "mlp_post_norm": "post_ffn_norm"}
    attention = FOLDER_ATTENTION | weights_of({"gate": gate})
    return lfm2_read.FOLDER.but(both=weights_of(norms), attention=inside("self_attn", attention))


CONVOLUTION, WINDOW, FULL = "conv", "sliding_attention", "full_attention"
#: The rotary positions of each kind of attention, where the config says nothing of them.
ROTARY: dict[str, dict[str, Any]] = {
    WINDOW: {"rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
#: Their base, where it has no number for one of the two.
THETA = 1e6


def read_lfm3(source: ForeignConfig, weights: Weights) -> tuple[Lfm3Config, Renamed]:
    """See the module's docstring."""
    files, config = weights.take_all(), _config(source)
    is_own = any(key.endswith(f".self_attn.{OWN_GATE}.weight") for key in files)
    names = folder_names(OWN_GATE if is_own else GATE)
    return config, names.read(files, config)


def key_layouts(config: Lfm3Config) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them."""
    return [folder_names(gate).parts_of(config) for gate in (GATE, OWN_GATE)]


def _config(source: ForeignConfig) -> Lfm3Config:
    source.only(conv_bias=False, attention_bias=False)
    usual = {"head_dim": 128, "num_key_value_heads": 4, "max_position_embeddings": 128_000}
    sizes = read_decoder(source, ("norm_eps", 1e-5), usual, tied=True)
    usual_kinds = [_usual_kind(layer) for layer in range(sizes["num_hidden_layers"])]
    kinds = layer_kinds(source, usual_kinds, (CONVOLUTION, WINDOW, FULL))
    rotary = _read_rotary(source, kinds, sizes["head_dim"])
    (theta, rotary_dim), (window_theta, window_dim) = rotary[FULL], rotary[WINDOW]
    return Lfm3Config(
        **sizes,
        attention_layers=layers_of(kinds, FULL),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        window_layers=layers_of(kinds, WINDOW),
        window=source.integer("sliding_window", 256),
        window_rope_theta=window_theta,
        window_rotary_dim=window_dim,
        head_gates=source.boolean("use_attention_gate", True),
        post_norms=source.boolean("use_sandwich_norm", True),
        conv_size=source.integer("conv_L_cache", 7),
    )


def _usual_kind(layer: int) -> str:
    if layer % 4 == 2:
        return FULL
    return WINDOW if layer and layer % 4 == 0 else CONVOLUTION


def _read_rotary(
    source: ForeignConfig, kinds: Collection[str], head_dim: int
) -> dict[str, tuple[float, int]]:
    """Of each kind of attention the base and the channels that turn; ``kinds`` are of layers."""
    family, values = source.family, source.anything("rope_parameters")
    if values is None:
        values = ROTARY
    if not isinstance(values, dict):
        raise ConfigError(f"{family}: rope_parameters must be an object, not {values!r:.80}")
    if unknown := sorted(values.keys() - ROTARY.keys()):
        raise ConfigError(f"{family}: unknown field rope_parameters.{unknown[0]}")
    found = {
        kind: values.get(kind, None if kind in kinds else usual) for kind, usual in ROTARY.items()
    }
    field = f"{family}: rope_parameters"
    return {kind: _rotary(f"{field}.{kind}", each, head_dim) for kind, each in found.items()}


def _rotary(field: str, values: Any, head_dim: int) -> tuple[float, int]:
    """Of one kind, which errors call ``field``.

    "proportional" turns a part of the pairs, by the frequencies that they have where all turn.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{field} must be an object, not {values!r:.80}")
    source, part = ForeignConfig({**values, "model_type": field}), 1.0
    if source.choice("rope_type", "default", "proportional") == "proportional":
        part = source.number("partial_rotary_factor", 1.0)
        if not 0.0 <= part <= 1.0:
            raise ConfigError(f"{field}: partial_rotary_factor must be in 0..1, not {part}")
        source.choice("factor", 1.0)
    source.choice("partial_rotary_factor", 1.0)
    theta = source.number("rope_theta", THETA)
    source.refuse_unknown()
    return theta, int(part * head_dim // 2) * 2
