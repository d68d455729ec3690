"""LFM3 in its Hugging Face layout, and its keys. llama.cpp has no such architecture: no GGUF."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from model.families.lfm2 import read as lfm2_read
from model.families.lfm3.config import Lfm3Config
from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.foreign.hybrid_names import HybridNames, layer_kinds, refuse_other_head, weight
from model.foreign.weights import Part, Renamed, Weights
from model.weights import file_name

#: The gate of heads in files; transformers' own name of it is `OWN_GATE`.
GATE, OWN_GATE = "gate_proj", "g_proj"


def folder_names(gate: str = GATE) -> HybridNames:
    """The keys of files that call the gate of heads so."""
    return HybridNames(
        ends=lfm2_read.FOLDER.ends,
        block=lfm2_read.FOLDER.block,
        both={
            **lfm2_read.FOLDER.both,
            "mixer_post_norm.weight": weight("post_operator_norm"),
            "mlp_post_norm.weight": weight("post_ffn_norm"),
        },
        attention={
            **{f"{name}.weight": weight(f"self_attn.{name}_proj") for name in "qkv"},
            "gate.weight": weight(f"self_attn.{gate}"),
            "out.weight": weight("self_attn.o_proj"),
            "q_norm.weight": weight("self_attn.q_norm"),
            "k_norm.weight": weight("self_attn.k_norm"),
        },
        other=lfm2_read.FOLDER.other,
    )


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
    files = weights.take_all()
    file, config = file_name(files), _config(source)
    is_own = any(key.endswith(f".self_attn.{OWN_GATE}.weight") for key in files)
    names = folder_names(OWN_GATE if is_own else GATE)
    ours = Renamed(files, names.parts_of(config))
    ours.check(file, config.weight_shapes(), refuse_other_head(files, config, names, file))
    return config, ours


def key_layouts(config: Lfm3Config) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them."""
    return [folder_names(gate).parts_of(config) for gate in (GATE, OWN_GATE)]


def _config(source: ForeignConfig) -> Lfm3Config:
    source.choice("conv_bias", False)
    source.choice("attention_bias", False)
    num_layers, vocab_size = source.num_layers("num_hidden_layers"), source.integer("vocab_size")
    usual = [_usual_kind(layer) for layer in range(num_layers)]
    kinds = layer_kinds(source, usual, (CONVOLUTION, WINDOW, FULL))
    head_dim = source.integer("head_dim", 128)
    rotary = _read_rotary(source, kinds, head_dim)
    (theta, rotary_dim), (window_theta, window_dim) = rotary[FULL], rotary[WINDOW]
    return Lfm3Config(
        vocab_size=vocab_size,
        hidden_size=source.integer("hidden_size"),
        num_hidden_layers=num_layers,
        intermediate_size=source.integer("intermediate_size"),
        attention_layers=tuple(i for i, kind in enumerate(kinds) if kind == FULL),
        num_attention_heads=source.integer("num_attention_heads"),
        num_key_value_heads=source.integer("num_key_value_heads", 4),
        head_dim=head_dim,
        rope_theta=theta,
        rotary_dim=rotary_dim,
        window_layers=tuple(i for i, kind in enumerate(kinds) if kind == WINDOW),
        window=source.integer("sliding_window", 256),
        window_rope_theta=window_theta,
        window_rotary_dim=window_dim,
        head_gates=source.boolean("use_attention_gate", True),
        post_norms=source.boolean("use_sandwich_norm", True),
        conv_size=source.integer("conv_L_cache", 7),
        norm_eps=source.number("norm_eps", 1e-5),
        tied=source.boolean("tie_word_embeddings", True),
        bos_token_id=source.special_id("bos_token_id", vocab_size),
        eos_token_id=source.special_id("eos_token_id", vocab_size),
        max_context=source.integer("max_position_embeddings", 128_000),
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
