"""Llama, Qwen2, Qwen3 and SmolLM3 in GGUF, as llama.cpp's converter writes them.

In ``llama`` and ``smollm3`` files the rows of q and k lie in pairs
(`model.foreign.paired_rows`).
"""

from __future__ import annotations

from typing import NamedTuple

from model.families.llama.config import LlamaConfig
from model.families.llama.read import GGUF, UNROTATED_INTERVAL
from model.files import ConfigError
from model.foreign.gguf_source import BOS, EOS, GgufSource
from model.foreign.paired_rows import PairedRows
from model.foreign.renamed import Renamed
from model.weights.gguf_file import GgufFile

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
    config = _config(GgufSource(file, name, family), file, kind)
    tensors = PairedRows(file, config) if kind.in_pairs else file
    weights = Renamed(tensors, GGUF.parts_of(config))
    weights.check(name, config.weight_shapes(), {FACTORS})
    return config, weights


def _config(source: GgufSource, file: GgufFile, kind: Kind) -> LlamaConfig:
    num_layers, size, width = source.sizes(file)
    source.ignore("rope.scaling.original_context_length", "rope.scaling.finetuned")
    source.choice("rope.scaling.type", "none")
    for key in ("attention.sliding_window", "expert_count", "expert_used_count"):
        if source.anything(key):
            raise ConfigError(f"{source.family}: {key} is not supported")
    heads = source.integer("attention.head_count")
    kv_heads = source.per_layer("attention.head_count_kv", num_layers)
    head_dim = source.integer("attention.key_length", width // heads)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=width,
        num_hidden_layers=num_layers,
        intermediate_size=source.integer("feed_forward_length"),
        num_attention_heads=heads,
        num_key_value_heads=source.num_kv_heads(kv_heads, tuple(range(num_layers))),
        head_dim=head_dim,
        rope_theta=source.number("rope.freq_base", 1e4),
        rope_factors=_factors(file),
        unrotated_layers=unrotated_layers(num_layers) if kind.has_unrotated else (),
        qk_norm=kind.qk_norm,
        qkv_bias="blk.0.attn_q.bias" in file,
        out_bias="blk.0.attn_output.bias" in file,
        norm_eps=source.number("attention.layer_norm_rms_epsilon", 1e-5),
        tied="output.weight" not in file,
        bos_token_id=source.special_id(BOS, size),
        eos_token_id=source.special_id(EOS, size),
        max_context=source.integer("context_length"),
    )
    for key in ("rope.dimension_count", "attention.value_length"):
        source.agree(key, head_dim)
    source.refuse_unknown()
    return config


def unrotated_layers(num_layers: int) -> tuple[int, ...]:
    """Those of a SmolLM3, of which a file says nothing."""
    return tuple(range(UNROTATED_INTERVAL - 1, num_layers, UNROTATED_INTERVAL))


def _factors(file: GgufFile) -> tuple[float, ...]:
    return tuple(float(factor) for factor in file[FACTORS].ravel()) if FACTORS in file else ()
