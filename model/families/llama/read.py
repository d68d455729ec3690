"""Llama and the families that are Llama with changes, in folders and in GGUF, and their keys.

Folders are of Hugging Face's layout, GGUF as llama.cpp's converter writes it: in ``llama`` and
``smollm3`` files the rows of q and k lie in pairs (`model.foreign.gguf`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from model.families.llama.config import LlamaConfig
from model.files import ConfigError
from model.foreign import hybrid_names
from model.foreign.config import SCALINGS, ForeignConfig, read_decoder, read_rotary
from model.foreign.gguf import GgufSource, PairedRows
from model.foreign.weights import Part, Renamed, Weights
from model.weights.gguf_file import GgufFile

FOLDER, GGUF = hybrid_names.folder_names(), hybrid_names.GGUF

# Qwen2 has biases, Qwen3 norms of queries and keys, SmolLM3 layers without positions. Windows of
# attention (``use_sliding_window``) are refused, and rotary positions that are scaled in other ways
# than "linear" and "llama3".


#: Tables that old files hold and the config implies.
TABLES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
#: Of so many layers of a SmolLM3 the last has no positions, where nothing else is known.
UNROTATED_INTERVAL = 4


def read_llama(source: ForeignConfig, weights: Weights) -> tuple[LlamaConfig, Renamed]:
    """See the module's docstring."""
    return _read(source, weights)


def read_qwen2(source: ForeignConfig, weights: Weights) -> tuple[LlamaConfig, Renamed]:
    """See the module's docstring."""
    _refuse_windows(source)
    return _read(source, weights, qkv_bias=True, max_context=32_768)


def read_qwen3(source: ForeignConfig, weights: Weights) -> tuple[LlamaConfig, Renamed]:
    """See the module's docstring."""
    _refuse_windows(source)
    return _read(source, weights, qk_norm=True, head_dim=128, max_context=32_768)


def read_smollm3(source: ForeignConfig, weights: Weights) -> tuple[LlamaConfig, Renamed]:
    """See the module's docstring."""
    _refuse_windows(source)
    return _read(source, weights, has_unrotated=True, theta=2e6, max_context=32_768)


def key_layouts(config: LlamaConfig) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them."""
    # Far parts are of no published file.
    return [FOLDER.parts_of(replace(config, windows=()))]


def _read(
    source: ForeignConfig,
    weights: Weights,
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    has_unrotated: bool = False,
    head_dim: int | None = None,
    theta: float = 10_000.0,
    max_context: int = 2048,
) -> tuple[LlamaConfig, Renamed]:
    """``head_dim``, ``theta`` and ``max_context`` are the family's defaults."""
    source.ignore("attention_dropout", "pretraining_tp", "is_llama_config")
    source.only(rope_interleaved=False, hidden_act="silu", mlp_bias=False)
    usual = {"head_dim": head_dim} if head_dim else {}
    usual |= {"max_position_embeddings": max_context}
    sizes = read_decoder(source, ("rms_norm_eps", 1e-6), usual)
    rotary = read_rotary(source, theta, scalings=tuple(SCALINGS))
    bias, num_layers = source.boolean("attention_bias", False), sizes["num_hidden_layers"]
    config = LlamaConfig(
        **sizes,
        rope_theta=rotary.theta,
        rope_factors=rotary.factors(sizes["head_dim"]),
        unrotated_layers=_unrotated_layers(source, num_layers) if has_unrotated else (),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias or bias,
        out_bias=bias,
    )
    return config, FOLDER.read(weights.take_all(), config, TABLES)


def _refuse_windows(source: ForeignConfig) -> None:
    source.choice("use_sliding_window", False)
    source.ignore("sliding_window", "max_window_layers")
    kinds = source.anything("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or set(kinds) - {"full_attention"}):
        raise ConfigError(
            f"{source.family}: layer_types must be a list of 'full_attention', not {kinds!r:.200}"
        )


def _unrotated_layers(source: ForeignConfig, num_layers: int) -> tuple[int, ...]:
    """Of ``no_rope_layers``, which is 0 where a layer has no positions, else of the interval."""
    interval = source.integer("no_rope_layer_interval", UNROTATED_INTERVAL)
    flags = source.anything("no_rope_layers")
    if flags is None:
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(flags, list) or any(flag not in (0, 1) for flag in flags):
        raise ConfigError(
            f"{source.family}: no_rope_layers must be a list of 0 and 1, not {flags!r:.200}"
        )
    return tuple(layer for layer, rotates in enumerate(flags) if not rotates)


#: What the frequencies of rotary positions are divided by, where they are scaled.
FACTORS = "rope_freqs.weight"


class Kind(NamedTuple):
    """How a family differs from ``llama``."""

    in_pairs: bool = True
    qk_norm: bool = False
    has_unrotated: bool = False


KINDS = {
    "llama": Kind(),
    "qwen2": Kind(in_pairs=False),
    "qwen3": Kind(in_pairs=False, qk_norm=True),
    "smollm3": Kind(has_unrotated=True),
}


def read_gguf(file: GgufFile, name: str) -> tuple[LlamaConfig, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    family = str(file.metadata["general.architecture"])
    kind = KINDS[family]
    config = _gguf_config(GgufSource(file, name, family), file, kind)
    tensors = PairedRows(file, config) if kind.in_pairs else file
    return config, GGUF.read(tensors, config, re.compile(re.escape(FACTORS)), name)


def _gguf_config(source: GgufSource, file: GgufFile, kind: Kind) -> LlamaConfig:
    source.ignore("rope.scaling.original_context_length", "rope.scaling.finetuned")
    source.choice("rope.scaling.type", "none")
    for key in ("attention.sliding_window", "expert_count", "expert_used_count"):
        if source.anything(key):
            raise ConfigError(f"{source.family}: {key} is not supported")
    sizes = source.decoder(file, all_attention=True)
    num_layers = len(sizes.pop("attention_layers"))
    config = LlamaConfig(
        **sizes,
        intermediate_size=source.integer("feed_forward_length"),
        rope_factors=_gguf_factors(file),
        unrotated_layers=unrotated_layers(num_layers) if kind.has_unrotated else (),
        qk_norm=kind.qk_norm,
        qkv_bias="blk.0.attn_q.bias" in file,
        out_bias="blk.0.attn_output.bias" in file,
    )
    source.agree("rope.dimension_count", config.head_dim)
    source.refuse_unknown()
    return config


def unrotated_layers(num_layers: int) -> tuple[int, ...]:
    """Those of a SmolLM3, of which a file says nothing."""
    return tuple(range(UNROTATED_INTERVAL - 1, num_layers, UNROTATED_INTERVAL))


def _gguf_factors(file: GgufFile) -> tuple[float, ...]:
    return tuple(float(factor) for factor in file[FACTORS].ravel()) if FACTORS in file else ()
