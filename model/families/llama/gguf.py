"""Llama, Qwen2, Qwen3 and SmolLM3 in GGUF, as llama.cpp's converter writes them.

In ``llama`` and ``smollm3`` files the rows of a head of q and k lie in pairs that turn together:
row ``2 i + s`` is row ``s F / 2 + i`` of the original, for F rows of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from model.families.llama.config import LlamaConfig
from model.families.llama.read import GGUF, UNROTATED_INTERVAL
from model.files import ConfigError
from model.foreign.gguf_source import BOS, EOS, GgufSource
from model.foreign.renamed import Renamed
from model.weights import Array, WrappedWeights
from model.weights.gguf_file import GgufFile

#: Rows of a tensor, from one to before another.
Read = Callable[[str, int, int | None], Array]
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


class PairedRows(WrappedWeights):
    """The tensors with the rows of q and k in the order of the original."""

    def __init__(self, file: GgufFile, config: LlamaConfig) -> None:
        super().__init__(file)
        half = config.head_dim // 2
        pairs = np.arange(2 * half).reshape(half, 2).T.ravel()
        self._orders: Mapping[str, npt.NDArray[Any]] = {
            f"attn_{name}": (np.arange(num)[:, None] * config.head_dim + pairs).ravel()
            for name, num in (("q", config.num_attention_heads), ("k", config.num_key_value_heads))
        }

    def __getitem__(self, name: str) -> Array:
        order = self._order_of(name)
        tensor = self._base[name]
        return tensor if order is None else tensor[order]

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        """See `StoredWeights`."""
        return self._in_order(self._base.rows, name, begin, end)

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        """See `StoredWeights`; a row's numbers stay in their order."""
        return self._in_order(self._base.blocks, name, begin, end)

    def block_kind(self, name: str) -> str | None:
        return self._base.block_kind(name)

    def _order_of(self, name: str) -> npt.NDArray[Any] | None:
        return self._orders.get(name.split(".")[2]) if name.startswith("blk.") else None

    def _in_order(self, read: Read, name: str, begin: int, end: int | None) -> Array:
        """The rows of the heads around them are read, and of these those that are asked for."""
        order = self._order_of(name)
        if order is None:
            return read(name, begin, end)
        order = order[begin:end]
        if not len(order):
            return read(name, 0, 0)
        first = int(order.min())
        rows: Array = read(name, first, int(order.max()) + 1)[order - first]
        return rows
