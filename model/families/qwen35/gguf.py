"""Qwen3.5 in GGUF, as llama.cpp's converter writes it.

Its last block may be a multi-token head (``nextn``), which is a model of its own. Where there are
more value heads than key heads, value heads lie in another order: head ``r Hk + g`` is head
``g Hv / Hk + r`` of the original.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from model.families.qwen35.config import MTP_INPUTS, Qwen35Config, Qwen35MtpConfig
from model.families.qwen35.read import GGUF, OTHER_MTP, logger, whole_mtp
from model.files import ConfigError
from model.foreign.gguf import BOS, EOS, GgufSource
from model.foreign.hybrid_names import weight
from model.foreign.weights import Renamed
from model.weights import Array, WrappedWeights
from model.weights.gguf_file import GgufFile

#: Tensors whose rows are heads of a few channels, and those whose rows are heads.
CHANNELS = ("attn_qkv.weight", "ssm_conv1d.weight", "attn_gate.weight")
HEADS = ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias")
#: The one whose columns are heads of a few channels.
COLUMNS = "ssm_out.weight"
#: Rows of a tensor, from one to before another.
Read = Callable[[str, int, int | None], Array]
Order = npt.NDArray[np.int64]


def read_gguf(file: GgufFile, name: str) -> tuple[Qwen35Config, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    source = GgufSource(file, name, "qwen35")
    num_blocks, vocab_size, width = source.sizes(file)
    num_extra = source.anything("nextn_predict_layers") or 0
    if type(num_extra) is not int or not 0 <= num_extra < num_blocks:
        raise ConfigError(
            f"{name}: nextn_predict_layers must be less than {num_blocks}, not {num_extra!r}"
        )
    is_tied = "output.weight" not in file
    config = _config(source, num_blocks - num_extra, vocab_size, width, is_tied)
    unused = {
        key
        for layer in range(config.num_hidden_layers, num_blocks)
        for key in file
        if key.startswith(f"{GGUF.block.format(layer)}.")
    }
    same_order = config.num_key_heads == config.num_value_heads
    weights = Renamed(file if same_order else HeadOrder(file, config), GGUF.parts_of(config))
    weights.check(name, config.weight_shapes(), unused)
    return config, weights


def read_gguf_mtp(file: GgufFile, config: Qwen35Config) -> tuple[Qwen35MtpConfig, Renamed] | None:
    """The multi-token head in the block behind the others; None where there is none, or more."""
    block = GGUF.block.format(config.num_hidden_layers)
    after = GGUF.block.format(config.num_hidden_layers + 1)
    if not any(key.startswith(f"{block}.") for key in file):
        return None
    if any(key.startswith(f"{after}.") for key in file):
        logger.info(OTHER_MTP)
        return None
    keys = {f"{name}_norm": f"{name[0]}norm" for name in MTP_INPUTS}
    keys |= {"join": "eh_proj", "norm": "shared_head_norm"}
    ends = {f"{name}.weight": weight(f"{block}.nextn.{key}") for name, key in keys.items()}
    return whole_mtp(file, replace(GGUF, ends=ends, block=block), f"{block}.", config)


def _config(
    source: GgufSource, num_layers: int, vocab_size: int, width: int, tied: bool
) -> Qwen35Config:
    name = source.family
    layers = _attention_layers(source, num_layers)
    kv_heads = source.per_layer("attention.head_count_kv", num_layers)
    head_dim, value_dim = (source.integer(f"attention.{k}_length", 256) for k in ("key", "value"))
    if value_dim != head_dim:
        raise ConfigError(f"{name}: attention.value_length is {value_dim}, not {head_dim}")
    _check_sections(source)
    key_heads, value_heads = (source.integer(f"ssm.{k}") for k in ("group_count", "time_step_rank"))
    config = Qwen35Config(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=num_layers,
        intermediate_size=source.integer("feed_forward_length"),
        attention_layers=layers,
        num_attention_heads=source.integer("attention.head_count"),
        num_key_value_heads=source.num_kv_heads(kv_heads, layers),
        head_dim=head_dim,
        rotary_dim=source.integer("rope.dimension_count", head_dim // 4),
        rope_theta=source.number("rope.freq_base", 1e7),
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=source.integer("ssm.state_size"),
        value_head_dim=source.integer("ssm.inner_size") // value_heads,
        conv_size=source.integer("ssm.conv_kernel"),
        norm_eps=source.number("attention.layer_norm_rms_epsilon", 1e-6),
        tied=tied,
        bos_token_id=source.special_id(BOS, vocab_size),
        eos_token_id=source.special_id(EOS, vocab_size),
        max_context=source.integer("context_length"),
    )
    source.refuse_unknown()
    return config


def _attention_layers(source: GgufSource, num_layers: int) -> tuple[int, ...]:
    interval = source.integer("full_attention_interval", Qwen35Config.interval)
    if "attention.recurrent_layers" not in source:
        return tuple(range(interval - 1, num_layers, interval))
    recurrent = source.per_layer("attention.recurrent_layers", num_layers)
    return tuple(layer for layer, is_recurrent in enumerate(recurrent) if not is_recurrent)


def _check_sections(source: GgufSource) -> None:
    """Positions of text are the same on all axes, so their division among channels says nothing."""
    sections: Any = source.anything("rope.dimension_sections")
    if sections is not None and not hasattr(sections, "dtype"):
        raise ConfigError(f"{source.family}: rope.dimension_sections must be an array of numbers")


class HeadOrder(WrappedWeights):
    """The tensors with their value heads in the order of the original."""

    def __init__(self, file: GgufFile, config: Qwen35Config) -> None:
        super().__init__(file)
        self._config = config  # which is compared with the tensors before they are read
        self._first_value = 2 * config.num_key_heads * config.key_head_dim

    @cached_property
    def _heads(self) -> Order:
        groups, head = self._config.num_key_heads, np.arange(self._config.num_value_heads)
        per_group = self._config.num_value_heads // groups
        return head % per_group * groups + head // per_group

    @cached_property
    def _channels(self) -> Order:
        size = self._config.value_head_dim
        return (self._heads[:, None] * size + np.arange(size)).ravel()

    def __getitem__(self, name: str) -> Array:
        return self.rows(name, 0, None)

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        """See `StoredWeights`; those that lie together in the file are read together."""
        kind = name.split(".", 2)[-1]
        if kind in HEADS:
            heads: Array = self._base[name][self._heads]
            return heads[begin:end]
        if kind == COLUMNS:
            return self._base.rows(name, begin, end)[:, self._channels]
        return self._in_order(self._base.rows, name, begin, end)

    def block_kind(self, name: str) -> str | None:
        is_by_rows = name.split(".", 2)[-1] not in (*HEADS, COLUMNS)
        return self._base.block_kind(name) if is_by_rows else None

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        """See `StoredWeights`; a row's numbers stay in their order."""
        return self._in_order(self._base.blocks, name, begin, end)

    def _in_order(self, read: Read, name: str, begin: int, end: int | None) -> Array:
        kind = name.split(".", 2)[-1]
        if kind not in CHANNELS:
            return read(name, begin, end)
        order = self._channels
        if kind != "attn_gate.weight":
            first = np.arange(self._first_value)
            order = np.concatenate([first, self._first_value + order])
        order = order[begin:end]
        runs = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
        parts = [read(name, int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]
        if not parts:
            return read(name, 0, 0)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
