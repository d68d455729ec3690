"""Qwen3.5 and Qwen3.6, dense, in their Hugging Face layouts and in GGUF, and their keys."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from model.families.qwen35.config import MTP_INPUTS, Qwen35Config, Qwen35MtpConfig
from model.files import ConfigError
from model.foreign import hybrid_names
from model.foreign.config import ForeignConfig, read_decoder, read_rotary
from model.foreign.gguf import BOS, EOS, GgufSource
from model.foreign.hybrid_names import HybridNames, inside, weight, weights_of
from model.foreign.layer_kinds import attention_layers
from model.foreign.weights import Part, Renamed, Weights
from model.weights import Array, CheckpointError, WrappedWeights, file_name, shape_in
from model.weights.gguf_file import GgufFile

logger = logging.getLogger("everstream.models")

# -------------------------------------------------------------------------------------------------
# The keys of Qwen3.5 files, and which of our weights each is.


def folder_names(prefix: str) -> HybridNames:
    """Those of Hugging Face folders, whose text model's keys begin with ``prefix``.

    All norms but that of the gated delta net are stored less one.
    """
    norms = {f"{name}_norm": f"self_attn.{name}_norm" for name in "qk"}
    return hybrid_names.folder_names(prefix, "plus_one").but(
        attention=weights_of(norms, "plus_one"),
        other=inside(
            "linear_attn",
            {
                **weights_of({name: f"in_proj_{name}" for name in ("qkv", "z", "b", "a")}),
                **weights_of({"norm": "norm", "out": "out_proj"}),
                "conv": weight("conv1d", "squeezed"),
                "A_log": Part(("A_log",)),
                "dt_bias": Part(("dt_bias",)),
            },
        ),
    )


#: Of GGUF, where all norms are what the model multiplies with.
GGUF = hybrid_names.GGUF.but(
    both={"mlp_norm.weight": weight("post_attention_norm")},
    other={
        **weights_of({"qkv": "attn_qkv", "z": "attn_gate", "b": "ssm_beta", "a": "ssm_alpha"}),
        **weights_of({"norm": "ssm_norm", "out": "ssm_out"}),
        "conv": weight("ssm_conv1d"),
        "A_log": Part(("ssm_a",), "log_negative"),
        "dt_bias": Part(("ssm_dt.bias",)),
    },
)


# -------------------------------------------------------------------------------------------------
# Published folders are multimodal (``qwen3_5``): their text model's config is ``text_config``, and
# its keys have a prefix of their own. What sees images is left out; what predicts several tokens
# (``mtp``) is a model of its own.


#: Of the multimodal config: what concerns images, and hints for other servers.
HARMLESS = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
    *("vision_end_token_id", "language_model_only", "bos_token_id", "eos_token_id"),
)
#: Of the text's: training, prediction of several tokens, and the state's dtype of other kernels.
TEXT_HARMLESS = (
    *("attention_dropout", "mamba_ssm_dtype", "mtp_num_hidden_layers"),
    *("mtp_use_dedicated_embeddings", "router_aux_loss_coef", "output_router_logits"),
)
#: What divides positions among axes of an image; those of text are the same on each.
AXES = frozenset({"mrope_section", "mrope_interleaved"})

KINDS = ("linear_attention", "full_attention")
#: Keys of the text model in multimodal folders, and in those of text alone.
PREFIXES = ("model.language_model.", "model.")
UNUSED = re.compile(r"(model\.visual\.|visual\.|mtp\.).*")


def read_qwen35(source: ForeignConfig, weights: Weights) -> tuple[Qwen35Config, Renamed]:
    """See the module's docstring."""
    files, config = weights.take_all(), _config(_text_config(source))
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in files), PREFIXES[1])
    names = folder_names(prefix)
    _refuse_converted(files, names.parts_of(config), config)
    return config, names.read(files, config, UNUSED)


# -------------------------------------------------------------------------------------------------
# The multi-token head, whose block is as the others. It only drafts, so a file's is left out where
# it is not whole or of another form.


#: What it begins with, in folders.
MTP = "mtp."
OTHER_MTP = "the multi-token head is left out: only one of one layer drafts"


def mtp_names() -> HybridNames:
    """The parts of a folder's multi-token head."""
    norms = {f"{name}_norm": f"{MTP}pre_fc_norm_{name}" for name in MTP_INPUTS}
    ends = weights_of({"join": f"{MTP}fc"}) | weights_of(
        {"norm": f"{MTP}norm", **norms}, "plus_one"
    )
    return replace(folder_names(MTP), ends=ends)


def read_mtp(
    values: Mapping[str, Any], files: Mapping[str, Array], config: Qwen35Config
) -> tuple[Qwen35MtpConfig, Renamed] | None:
    """The multi-token head in a folder's tensors; None where there is none that drafts here."""
    if not any(key.startswith(MTP) for key in files):
        return None
    text = values.get("text_config") or values
    num_layers, has_embedding = (
        text.get(f"mtp_{name}") for name in ("num_hidden_layers", "use_dedicated_embeddings")
    )
    if num_layers not in (None, 1) or has_embedding:
        logger.info(OTHER_MTP)
        return None
    return whole_mtp(files, mtp_names(), MTP, config)


def whole_mtp(
    files: Mapping[str, Array], names: HybridNames, prefix: str, config: Qwen35Config
) -> tuple[Qwen35MtpConfig, Renamed] | None:
    """A head whose keys all begin with ``prefix``; None, and a log line, where it is not whole."""
    head = Qwen35MtpConfig.of(config)
    weights = Renamed(files, names.parts_of(head))
    try:
        others = {key for key in files if not key.startswith(prefix)}
        weights.check(file_name(files), head.weight_shapes(), others)
    except CheckpointError as error:
        logger.info("the multi-token head is left out: %s", error)
        return None
    return head, weights


def key_layouts(config: Qwen35Config) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them."""
    return [folder_names(prefix).parts_of(config) for prefix in PREFIXES]


def _refuse_converted(
    files: Mapping[str, Array], parts: Mapping[str, Part], config: Qwen35Config
) -> None:
    """Raises `CheckpointError` for files of MLX, whose norms are stored as they are."""
    keys = [part.keys[0] for ours, part in parts.items() if ours.endswith(".conv")]
    for key in keys:
        shape = shape_in(files, key) if key in files else ()
        if len(shape) == 3 and shape[2] == 1 < config.conv_size:
            raise CheckpointError(
                f"{file_name(files)}: {key} is {list(shape)}, as files converted for MLX have it,"
                " which are not supported: use the original"
            )


def _text_config(source: ForeignConfig) -> ForeignConfig:
    """The fields of the text model, with the ends of text that the whole config has."""
    if source.family != "qwen3_5":
        return source
    values: Any = source.anything("text_config")
    if not isinstance(values, dict):
        raise ConfigError(f"{source.family}: text_config must be an object, not {values!r:.80}")
    kind = values.get("model_type", "qwen3_5_text")
    if kind != "qwen3_5_text":
        raise ConfigError(
            f"{source.family}: text_config.model_type {kind!r:.80} is not supported,"
            " only 'qwen3_5_text'"
        )
    values = {name: value for name, value in values.items() if value is not None}
    values = {"tie_word_embeddings": False, **values, "model_type": "qwen3_5_text"}
    tied = source.boolean("tie_word_embeddings", values["tie_word_embeddings"])
    if tied != values["tie_word_embeddings"]:
        raise ConfigError(f"{source.family}: tie_word_embeddings is {tied}, text_config's is not")
    for name in ("bos_token_id", "eos_token_id"):
        if values.get(name) is None:
            values[name] = source.anything(name)
    source.ignore(*HARMLESS)
    source.refuse_unknown()
    return ForeignConfig(values, source.files)


def _config(source: ForeignConfig) -> Qwen35Config:
    source.ignore(*TEXT_HARMLESS)
    source.only(hidden_act="silu", attention_bias=False, attn_output_gate=True, mlp_only_layers=[])
    source.choice("output_gate_type", "swish", "silu")
    usual = {"num_key_value_heads": None, "head_dim": 256, "max_position_embeddings": 32_768}
    sizes = read_decoder(source, ("rms_norm_eps", 1e-6), usual)
    rotary, interval = read_rotary(source, 1e7, 0.25, AXES), "full_attention_interval"
    layers = sizes["num_hidden_layers"], KINDS, source.integer(interval, 4)
    config = Qwen35Config(
        **sizes,
        attention_layers=attention_layers(source, *layers),
        rotary_dim=int(sizes["head_dim"] * rotary.part),
        rope_theta=rotary.theta,
        num_key_heads=source.integer("linear_num_key_heads", 16),
        num_value_heads=source.integer("linear_num_value_heads", 32),
        key_head_dim=source.integer("linear_key_head_dim", 128),
        value_head_dim=source.integer("linear_value_head_dim", 128),
        conv_size=source.integer("linear_conv_kernel_dim", 4),
    )
    source.refuse_unknown()
    return config


# -------------------------------------------------------------------------------------------------
# GGUF, as llama.cpp's converter writes it. The last block may be a multi-token head (``nextn``),
# which is a model of its own. Where there are more value heads than key heads, value heads lie in
# another order: head ``r Hk + g`` is head ``g Hv / Hk + r`` of the original.


#: Tensors whose rows are heads of a few channels, and those whose rows are heads.
CHANNELS = ("attn_qkv.weight", "ssm_conv1d.weight", "attn_gate.weight")
HEADS = ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias")
#: The one whose columns are heads of a few channels.
COLUMNS = "ssm_out.weight"
#: Rows of a tensor, from one to before another.
RowsRead = Callable[[str, int, int | None], Array]
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
    config = _gguf_config(source, num_blocks - num_extra, vocab_size, width, is_tied)
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
    ends = weights_of({name: f"{block}.nextn.{key}" for name, key in keys.items()})
    return whole_mtp(file, replace(GGUF, ends=ends, block=block), f"{block}.", config)


def _gguf_config(
    source: GgufSource, num_layers: int, vocab_size: int, width: int, tied: bool
) -> Qwen35Config:
    name = source.family
    layers = _gguf_layers(source, num_layers)
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


def _gguf_layers(source: GgufSource, num_layers: int) -> tuple[int, ...]:
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

    def _in_order(self, read: RowsRead, name: str, begin: int, end: int | None) -> Array:
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
