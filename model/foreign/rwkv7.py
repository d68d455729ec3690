"""RWKV-7 as it is published: native ``.pth`` files and Hugging Face folders.

All hold the same tensors; the keys, not the config, say under which names
(`model.foreign.rwkv7_names`). Native low-rank matrices are [in, out], those of fla are Linear
weights [out, in]. Vectors may be [D] or [1, 1, D]. Sizes are read from the weights; a
``config.json`` may only agree with them. Tensors are read when they are asked for.

Id 0 begins and ends texts in every RWKV vocabulary, also where a ``config.json`` differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.architectures.rwkv7.config import LOW_RANKS, Rwkv7Config
from model.checkpoint_files import RWKV_CPP_SUFFIX, ST_SUFFIX
from model.files import ConfigError
from model.foreign import GROWS
from model.foreign.config import ForeignConfig
from model.foreign.key_shapes import KeyShapes
from model.foreign.renamed import Renamed
from model.foreign.rwkv7_names import (
    LETTERS,
    NATIVE,
    RWKV_CPP,
    TURNED,
    Names,
    TimeMixNames,
    layout_of,
    parts_of,
    unused_keys,
)
from model.foreign.weights import Weights
from model.weights import Array, CheckpointError, StoredWeights, file_name
from model.weights.rwkv_cpp import RwkvCppFile, Sizes
from model.weights.safetensors import WeightFiles
from model.weights.torch_file import TorchFile

#: What training and other kernels use, and special ids: see the module's docstring. Our sums are
#: float32 for any ``wkv_*``.
HARMLESS = (
    *("attn_mode", "fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp"),
    *("max_position_embeddings", "bos_token_id", "eos_token_id", "rescale_prenorm_residual"),
    *("tokenizer_class", "context_length", "architecture_version", "number_of_conv_states"),
    *("wkv_state_dtype", "wkv_implementation", "wkv_mode"),
    *("rwkv7_hf_adapter_layout", "rwkv7_hf_runtime_version", "hidden_ratio"),
    # How rwkv7-hf packs plain weights once it has loaded them.
    *("use_native_mm8", "native_mm8_min_params", "native_mm8_policy"),
    *("use_native_mm4", "native_mm4_min_params", "native_mm4_policy"),
    *("native_mm4_group_size", "native_mm4_group_policy"),
    # The shape of r_k decides: converters leave the number of another size here.
    *("num_heads", "num_attention_heads"),
)

#: What some folders call the fields.
OTHER_FIELDS = {
    "head_size": "head_dim",
    "layer_norm_epsilon": "norm_eps",
    "lora_rank_decay": "decay_low_rank_dim",
    "lora_rank_iclr": "a_low_rank_dim",
    "lora_rank_value_residual_mix": "v_low_rank_dim",
    "lora_rank_gate": "gate_low_rank_dim",
}

#: Keys that only another generation has, the newest first.
VARIANTS = (
    (r"\.ffn\.enn\.weight$", "an RWKV-8 model; only RWKV-7 is supported"),
    (r"\bblocks\.\d+\.qkv\.", "an RWKV-7b model, which is not supported: its state grows"),
    (r"\.ffn\.s_emb", "an RWKV-7a model; its deep embeddings are not supported"),
    (r"\.att\.time_maa_", "an RWKV-6 model; only RWKV-7 is supported"),
    (r"\.att\.gate\.weight$", "an RWKV-5 model; only RWKV-7 is supported"),
    (r"\.att(ention)?\.time_decay$", "an RWKV-4 or RWKV-5 model; only RWKV-7 is supported"),
    (
        r"\.(q_weight\w*|qweight|packed_\w+)$",
        "packed for the kernels of rwkv7-hf, which is not supported: publish the weights unpacked",
    ),
)


def open_native(path: Path) -> StoredWeights:
    """The tensors of a ``.pth`` or ``.st`` file, or of one of rwkv.cpp, by its keys."""
    if path.suffix == RWKV_CPP_SUFFIX:
        return RwkvCppFile(path)
    return WeightFiles([path]) if path.suffix == ST_SUFFIX else TorchFile(path)


def read_native(files: StoredWeights, name: str) -> tuple[Rwkv7Config, Renamed]:
    """The model in a file called ``name``. Raises `CheckpointError` that names the key."""
    _refuse_variants(files, name)
    names = NATIVE
    if name.endswith(ST_SUFFIX) and "blocks.0.att.w1" in files:
        down = files.shape("blocks.0.att.w1")  # its longer axis is the width
        names = TURNED if len(down) == 2 and down[0] < down[1] else NATIVE
    if isinstance(files, RwkvCppFile):
        names = RWKV_CPP
    config = sizes(files, name, names)
    if isinstance(files, RwkvCppFile):
        _check_stated(files.stated, config, name)
    # A tuned state that is merged in is read by `model.foreign.rwkv7_state`.
    states = {key for key in files if re.fullmatch(r"blocks\.\d+\.att\.time_state", key)}
    return config, renamed(files, name, config, names, states)


def _check_stated(stated: Sizes, config: Rwkv7Config, name: str) -> None:
    """Raises `CheckpointError` where a file of rwkv.cpp says other sizes than its tensors have."""
    found = Sizes(config.vocab_size, config.hidden_size, config.num_hidden_layers)
    if stated != found:
        raise CheckpointError(f"{name}: its sizes are {[*stated]}, the tensors have {[*found]}")


def read_rwkv7(source: ForeignConfig, weights: Weights) -> tuple[Rwkv7Config, Renamed]:
    """The model in a folder: see the module's docstring."""
    source.ignore(*HARMLESS)
    files = weights.take_all()
    file = file_name(files)
    names = _refuse_variants(files, file)
    _refuse_fields(source)
    # A group norm whose epsilon does not follow the head size comes with this name of the other.
    has_own_eps = "layer_norm_epsilon" in source
    source.rename(OTHER_FIELDS)
    is_normed = not source.boolean("embedding_layer_norm_fused", False)
    config = replace(sizes(files, file, names), embedding_norm=is_normed)
    norm_eps = source.number("norm_eps", 1e-5)
    follows = 64e-5 if has_own_eps else norm_eps * config.head_dim
    group_norm_eps = source.number("group_norm_epsilon", follows)
    config = replace(config, norm_eps=norm_eps, group_norm_eps=group_norm_eps)
    _check_sizes(source, config)
    return config, renamed(files, file, config, names)


def _refuse_fields(source: ForeignConfig) -> None:
    """Raises `ConfigError` for what this network does not do."""
    if (attention := source.anything("attn")) is not None:
        raise ConfigError(f"{source.family}: attn {attention!r:.80} is not supported: {GROWS}")
    kinds = source.anything("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "linear_attention" for kind in kinds):
        raise ConfigError(f"{source.family}: layer_types {kinds!r:.80} is not supported: {GROWS}")
    source.choice("head_size_divisor", 8)
    source.choice("hidden_act", "sqrelu")
    source.choice("norm_first", True)
    source.choice("norm_bias", True)
    source.choice("tie_word_embeddings", False)


def sizes(files: Mapping[str, Array], name: str, names: Names) -> Rwkv7Config:
    """The config, from the shapes of the weights; what these do not show is left at its default."""
    shape = KeyShapes(files, name)
    num_layers = shape.num_layers(names.block)
    vocab_size, width = shape(names.embedding)
    inner = names.projections["channel_mix.key"]
    return Rwkv7Config(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=num_layers,
        intermediate_size=shape(f"{names.block.format(0)}.{inner}.weight")[0],
        **time_mix_sizes(shape, names, width, num_layers, "wavg"),
    )


def time_mix_sizes(
    shape: KeyShapes, names: TimeMixNames, width: int, num_layers: int, letters: str
) -> dict[str, Any]:
    """``head_dim`` and the ranks of the low-rank maps ``letters``, as a config has them."""
    heads, head_dim = shape(f"{names.block.format(0)}.{names.vectors[2]}")
    if heads * head_dim != width:
        raise CheckpointError(
            f"{shape.name}: r_k is {[heads, head_dim]} for a width of {width}: an"
            " attention_hidden_size other than hidden_size is not supported"
        )
    sizes = {"head_dim": head_dim}
    for letter in letters:
        _, field = LOW_RANKS[LETTERS[letter]]
        layer = 1 if letter == "v" else 0
        key = f"{names.block.format(layer)}.{names.low_rank[0].format(letter)}"
        sizes[field] = 1 if layer >= num_layers else shape.formed(key, names.low_rank_form)[0]
    return sizes


def renamed(
    files: Mapping[str, Array],
    name: str,
    config: Rwkv7Config,
    names: Names,
    unused: Set[str] = frozenset(),
) -> Renamed:
    """The weights, of which each key is there, has its shape, and none but ``unused`` is left."""
    weights = Renamed(files, parts_of(config, names))
    weights.check(name, config.weight_shapes(), unused_keys(names) | unused)
    return weights


def _check_sizes(source: ForeignConfig, config: Rwkv7Config) -> None:
    """Raises `ConfigError` where ``config.json`` says another size than the weights have."""
    width = config.hidden_size
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": width,
        "num_hidden_layers": config.num_hidden_layers,
        "head_dim": config.head_dim,
        "attention_hidden_size": width,
        "intermediate_size": config.intermediate_size,
        "decay_low_rank_dim": config.decay_rank,
        "a_low_rank_dim": config.rate_rank,
        "gate_low_rank_dim": config.gate_rank,
    }
    if config.num_hidden_layers > 1:
        sizes["v_low_rank_dim"] = config.value_rank
    else:
        source.ignore("v_low_rank_dim")
    for name, size in sizes.items():
        found = source.integer(name, size)
        if found != size:
            raise ConfigError(f"{source.family}: {name} is {found}, the weights have {size}")
    dims = source.anything("value_dim")
    dims = dims if isinstance(dims, list) else [width if dims is None else dims]
    if any(dim != width for dim in dims):
        raise ConfigError(f"{source.family}: value_dim must be {width} in all layers, not {dims}")


def _refuse_variants(files: Mapping[str, Array], name: str) -> Names:
    """The names of the tensors. Raises `CheckpointError` for the other generations, by name."""
    for pattern, what in VARIANTS:
        if any(re.search(pattern, key) for key in files):
            raise CheckpointError(f"{name} is {what}")
    names = layout_of(files)
    if names is None:
        raise CheckpointError(
            f"{name} is not an RWKV-7 model: it has no key 'blocks.0.att.r_k',"
            " nor what this is called in other files"
        )
    return names
