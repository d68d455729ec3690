"""RWKV-7 as it is published: native files, Hugging Face folders, GGUF, tuned states; their keys.

In GGUF, as llama.cpp's converter writes it, the low-rank matrices are Linear weights [out, in]. The
token shift of the time mix is one tensor [6, 1, 1, D] in the order r, w, k, v, a, g, and ``r_k`` is
[D]. The first layer has no values to mix in: its ``time_mix_v*`` are copies of ``time_mix_a*``, and
are not read.

State tuning trains what the time mix of each layer begins with, and leaves the weights as they
are. Its file has the tensors ``blocks.I.att.time_state`` [H, N, N] alone; the token shifts begin
with zeros. For RWKV-7 it is the kernel's own initial state, with values as rows and keys as
columns, so S_ours[key, value] is its transpose. RWKV-PEFT writes it so since the sixth of February
2025; its versions of the two days before, and programs that give the matrix to
flash-linear-attention as it is, have keys as rows. (Programs for RWKV-5 and RWKV-6 transpose the
file's matrix when they load it.) RWKV-PEFT can also write such a state into the file of the
weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from model.checkpoint_files import RWKV_CPP_SUFFIX, ST_SUFFIX
from model.families.rwkv7.config import LOW_RANKS, Rwkv7Config
from model.files import ConfigError
from model.foreign import GROWS
from model.foreign.config import ForeignConfig
from model.foreign.weights import KeyShapes, Part, Renamed, Weights
from model.tensor_spec import Shape
from model.weights import Array, CheckpointError, StoredWeights, WrappedWeights, file_name, shape_in
from model.weights.gguf_file import GgufFile
from model.weights.rwkv_cpp import RwkvCppFile, Sizes
from model.weights.safetensors import WeightFiles
from model.weights.torch_file import TorchFile

# -------------------------------------------------------------------------------------------------
# The keys of RWKV-7 files, and which of our weights each is.


#: The inputs of the time mix in the order of the rows of ``shift_mix``.
INPUTS = "rwkvag"
#: Letters of the low-rank maps in the files -> our names.
LETTERS = {"w": "decay", "a": "rate", "v": "value_mix", "g": "gate"}


@dataclass(frozen=True)
class TimeMixNames:
    """The keys of a time mix. ``{}`` is a layer in ``block`` and a letter in the rest."""

    block: str
    shift_mix: Part
    #: k_k, k_a and r_k.
    vectors: tuple[str, str, str]
    #: Of a low-rank map: down, up, bias.
    low_rank: tuple[str, ...]
    low_rank_form: str


@dataclass(frozen=True)
class Names(TimeMixNames):
    """The keys of one kind of file of RWKV-7."""

    embedding: str
    head: str
    embedding_norm: str
    norm: str
    channel_shift_mix: str
    #: Our names -> theirs, without ``weight`` and ``bias``.
    norms: Mapping[str, str]
    projections: Mapping[str, str]


NATIVE = Names(
    embedding="emb.weight",
    head="head.weight",
    embedding_norm="blocks.0.ln0",
    norm="ln_out",
    block="blocks.{}",
    shift_mix=Part(tuple(f"att.x_{letter}" for letter in INPUTS), "flat"),
    channel_shift_mix="ffn.x_k",
    vectors=("att.k_k", "att.k_a", "att.r_k"),
    low_rank=("att.{}1", "att.{}2", "att.{}0"),
    low_rank_form="transposed",
    norms={"time_norm": "ln1", "channel_norm": "ln2", "time_mix.group_norm": "att.ln_x"},
    projections={
        "time_mix.receptance": "att.receptance",
        "time_mix.key": "att.key",
        "time_mix.value": "att.value",
        "time_mix.output": "att.output",
        "channel_mix.key": "ffn.key",
        "channel_mix.value": "ffn.value",
    },
)
#: Of `.st` files, whose low-rank matrices are transposed.
TURNED = replace(NATIVE, low_rank_form="same")
#: Of files of rwkv.cpp, whose token shift of the time mix is one tensor [6, 1, D].
RWKV_CPP = replace(TURNED, shift_mix=Part(("att.x_rwkvag",), "squeezed"))
#: Of folders of the RWKV project.
OFFICIAL = replace(
    NATIVE,
    embedding="rwkv7.emb.weight",
    embedding_norm="rwkv7.blocks.0.ln0",
    norm="rwkv7.ln_out",
    block="rwkv7.blocks.{}",
)
#: Of folders of transformers-rwkv until August 2026.
BLOCKS = replace(
    NATIVE,
    embedding="model.emb.weight",
    embedding_norm="model.blocks.0.ln0",
    norm="model.ln_out",
    block="model.blocks.{}",
)
FLA = Names(
    embedding="model.embeddings.weight",
    head="lm_head.weight",
    embedding_norm="model.layers.0.pre_norm",
    norm="model.norm",
    block="model.layers.{}",
    shift_mix=Part(tuple(f"attn.x_{letter}" for letter in INPUTS), "flat"),
    channel_shift_mix="ffn.x_k",
    vectors=("attn.k_k", "attn.k_a", "attn.r_k"),
    low_rank=(
        "attn.{}_lora.lora.0.weight",
        "attn.{}_lora.lora.2.weight",
        "attn.{}_lora.lora.2.bias",
    ),
    low_rank_form="same",
    norms={
        "time_norm": "attn_norm",
        "channel_norm": "ffn_norm",
        "time_mix.group_norm": "attn.g_norm",
    },
    projections={
        "time_mix.receptance": "attn.r_proj",
        "time_mix.key": "attn.k_proj",
        "time_mix.value": "attn.v_proj",
        "time_mix.output": "attn.o_proj",
        "channel_mix.key": "ffn.key",
        "channel_mix.value": "ffn.value",
    },
)
#: Older files have one tensor [6, D] for the token shift of the time mix.
FUSED = replace(FLA, shift_mix=Part(("attn.x_x",)))
#: Of folders of transformers-rwkv since then.
LINEAR_ATTENTION = replace(
    FLA,
    embedding="model.embed_tokens.weight",
    embedding_norm="model.embedding_norm",
    shift_mix=Part(tuple(f"linear_attn.x_{letter}" for letter in INPUTS), "flat"),
    channel_shift_mix="mlp.x_k",
    vectors=("linear_attn.k_k", "linear_attn.k_a", "linear_attn.r_k"),
    low_rank=("linear_attn.{}1", "linear_attn.{}2", "linear_attn.{}0"),
    low_rank_form="transposed",
    norms={
        "time_norm": "input_layernorm",
        "channel_norm": "post_attention_layernorm",
        "time_mix.group_norm": "linear_attn.g_norm",
    },
    projections={
        "time_mix.receptance": "linear_attn.r_proj",
        "time_mix.key": "linear_attn.k_proj",
        "time_mix.value": "linear_attn.v_proj",
        "time_mix.output": "linear_attn.o_proj",
        "channel_mix.key": "mlp.key",
        "channel_mix.value": "mlp.value",
    },
)
#: Of GGUF, without the axes of one that some tensors have there; see `model.families.rwkv7.read`.
GGUF = Names(
    embedding="token_embd.weight",
    head="output.weight",
    embedding_norm="token_embd_norm",
    norm="output_norm",
    block="blk.{}",
    shift_mix=Part(("time_mix_lerp_fused.weight",)),
    channel_shift_mix="channel_mix_lerp_k.weight",
    vectors=("time_mix_k_k.weight", "time_mix_k_a.weight", "time_mix_r_k.weight"),
    low_rank=("time_mix_{}1.weight", "time_mix_{}2.weight", "time_mix_{}0.weight"),
    low_rank_form="same",
    norms={
        "time_norm": "attn_norm",
        "channel_norm": "attn_norm_2",
        "time_mix.group_norm": "time_mix_ln",
    },
    projections={
        "time_mix.receptance": "time_mix_receptance",
        "time_mix.key": "time_mix_key",
        "time_mix.value": "time_mix_value",
        "time_mix.output": "time_mix_output",
        "channel_mix.key": "channel_mix_key",
        "channel_mix.value": "channel_mix_value",
    },
)

#: Of folders and of files that are safetensors.
LAYOUTS = (NATIVE, OFFICIAL, BLOCKS, LINEAR_ATTENTION, FLA, FUSED)


def layout_of(keys: Container[str]) -> Names | None:
    """The names of the files that have ``keys``; None where they are not of an RWKV-7."""
    for names in LAYOUTS:
        first, (_, _, r_k) = names.block.format(0), names.vectors
        is_other = names is FLA and f"{first}.{FUSED.shift_mix.keys[0]}" in keys
        if f"{first}.{r_k}" in keys and not is_other:
            return names
    return None


def parts_of(config: Rwkv7Config, names: Names) -> dict[str, Part]:
    """Where each weight that ``config`` lists is, by our names."""
    ends, block = _end_parts(names), _block_parts(names)
    return {
        ours: ends[ours] if ours in ends else in_block(ours, block, names)
        for ours in config.weight_shapes()
    }


def key_layouts(config: Rwkv7Config) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them."""
    return [parts_of(config, names) for names in LAYOUTS]


def in_block(ours: str, parts: Mapping[str, Part], names: TimeMixNames) -> Part:
    """Where our weight of a block is, of which ``parts`` are known without the block's own name."""
    _, layer, name = ours.split(".", 2)
    theirs = names.block.format(layer)
    return Part(tuple(f"{theirs}.{key}" for key in parts[name].keys), parts[name].form)


def unused_keys(names: Names) -> set[str]:
    """What files may have and no model computes with.

    The norm of the embedding may be in its rows already.
    """
    norm = {f"{names.embedding_norm}.{kind}" for kind in ("weight", "bias")}
    return unused_values(names) | norm


def unused_values(names: TimeMixNames) -> set[str]:
    """Of the first layer, which has no values to mix in."""
    first = names.block.format(0)
    return {f"{first}.{key.format('v')}" for key in names.low_rank}


def _end_parts(names: Names) -> dict[str, Part]:
    """Of what is outside of the blocks; not every model has all of it."""
    matrices = {"embedding.weight": names.embedding, "head.weight": names.head}
    parts = {ours: Part((key,)) for ours, key in matrices.items()}
    return parts | affine("embedding_norm", names.embedding_norm) | affine("norm", names.norm)


def _block_parts(names: Names) -> dict[str, Part]:
    """Of any block, without its own name; not every block has all of it."""
    parts = {f"time_mix.{ours}": part for ours, part in time_mix_parts(names).items()}
    parts["channel_mix.shift_mix"] = Part((names.channel_shift_mix,), "flat")
    parts |= {f"{ours}.weight": Part((f"{key}.weight",)) for ours, key in names.projections.items()}
    for ours, key in names.norms.items():
        parts |= affine(ours, key)
    return parts


def time_mix_parts(names: TimeMixNames) -> dict[str, Part]:
    """Of a time mix, without projections and norm; not every one has all of it."""
    k_k, k_a, r_k = names.vectors
    parts = {
        "shift_mix": names.shift_mix,
        "k_k": Part((k_k,), "flat"),
        "k_a": Part((k_a,), "flat"),
        "r_k": Part((r_k,)),
    }
    for letter, name in LETTERS.items():
        down, up, bias = (key.format(letter) for key in names.low_rank)
        parts[f"{name}.down.weight"] = Part((down,), names.low_rank_form)
        parts[f"{name}.up.weight"] = Part((up,), names.low_rank_form)
        parts[f"{name}.up.bias"] = Part((bias,), "flat")
    return parts


def affine(ours: str, theirs: str) -> dict[str, Part]:
    """Weight and bias of a norm."""
    return {f"{ours}.{kind}": Part((f"{theirs}.{kind}",)) for kind in ("weight", "bias")}


# -------------------------------------------------------------------------------------------------
# All layouts hold the same tensors; the keys, not the config, say under which names. Native
# low-rank matrices are [in, out], those of fla are Linear weights [out, in]. Vectors may be [D]
# or [1, 1, D]. Sizes are read from the weights; a ``config.json`` may only agree with them.
# Tensors are read when they are asked for.
#
# Id 0 begins and ends texts in every RWKV vocabulary, also where a ``config.json`` differs.


#: What training and other kernels use, and special ids: see above. Our sums are
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
    # A tuned state that is merged in is read by `model.families.rwkv7.read`.
    states = {key for key in files if re.fullmatch(r"blocks\.\d+\.att\.time_state", key)}
    return config, renamed(files, name, config, names, states)


def _check_stated(stated: Sizes, config: Rwkv7Config, name: str) -> None:
    """Raises `CheckpointError` where a file of rwkv.cpp says other sizes than its tensors have."""
    found = Sizes(config.vocab_size, config.hidden_size, config.num_hidden_layers)
    if stated != found:
        raise CheckpointError(f"{name}: its sizes are {[*stated]}, the tensors have {[*found]}")


def read_rwkv7(source: ForeignConfig, weights: Weights) -> tuple[Rwkv7Config, Renamed]:
    """The model in a folder."""
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


#: llama.cpp computes with this epsilon for every head size.
GROUP_NORM_EPS = 64e-5
#: What the file says of training, or of kernels.
GGUF_HARMLESS = ("context_length", "attention.head_count", "attention.head_count_kv")

#: The ids that texts begin and end with.
BOS, EOS = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"


def metadata_of(file: GgufFile, name: str, prefix: str) -> ForeignConfig:
    """The fields that begin with ``prefix``, and the ids that texts begin and end with."""
    values = {key: value for key, value in file.metadata.items() if key.startswith(prefix)}
    ends = {key: file.metadata.get(key, 0) for key in (BOS, EOS)}
    short = {key: v[:80] if isinstance(v, str) else v for key, v in (values | ends).items()}
    return ForeignConfig({"model_type": name, **short})


def read_gguf(file: GgufFile, name: str) -> tuple[Rwkv7Config, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    prefix = "rwkv7."
    source = metadata_of(file, name, prefix)
    source.ignore(*(prefix + field for field in GGUF_HARMLESS))
    source.choice(f"{prefix}token_shift_count", 2)
    source.choice(f"{prefix}rescale_every_n_layers", 0)
    tensors = TimeMixTensors(file, name, source.integer(f"{prefix}wkv.head_size"))
    config = sizes(tensors, name, GGUF)
    _check_metadata(source, prefix, config)
    config = replace(
        config,
        norm_eps=source.number(f"{prefix}attention.layer_norm_epsilon", 1e-5),
        group_norm_eps=GROUP_NORM_EPS,
        bos_token_id=source.special_id(BOS, config.vocab_size),
        eos_token_id=source.special_id(EOS, config.vocab_size),
    )
    source.refuse_unknown()
    return config, renamed(tensors, name, config, GGUF)


def _check_metadata(source: ForeignConfig, prefix: str, config: Rwkv7Config) -> None:
    """Raises `ConfigError` where the metadata says another size than the tensors have."""
    wanted = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.decay_lora_rank": config.decay_rank,
        "attention.iclr_lora_rank": config.rate_rank,
        "attention.value_residual_mix_lora_rank": config.value_rank,
        "attention.gate_lora_rank": config.gate_rank,
    }
    if config.num_hidden_layers == 1:
        source.ignore(prefix + "attention.value_residual_mix_lora_rank")
        del wanted["attention.value_residual_mix_lora_rank"]
    for field, size in wanted.items():
        agree(source, prefix + field, source.integer(prefix + field), size)
    size = config.vocab_size
    agree(source, f"{prefix}vocab_size", source.integer(f"{prefix}vocab_size", size), size)


def agree(source: ForeignConfig, key: str, found: int, size: int) -> None:
    """Raises `ConfigError` where the metadata say another size than the tensors have."""
    if found != size:
        raise ConfigError(f"{source.family}: {key} is {found}, the tensors have {size}")


class TimeMixTensors(WrappedWeights):
    """The tensors without axes of one beyond the second, and ``r_k`` as [heads, features]."""

    def __init__(self, file: GgufFile, file_name: str, head_dim: int) -> None:
        super().__init__(file)
        self._file_name, self._head_dim = file_name, head_dim

    def __getitem__(self, name: str) -> Array:
        return self._base[name].reshape(self.shape(name))

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        if self.shape(name) == self._base.shape(name):
            return self._base.rows(name, begin, end)
        return self[name][begin:end]

    def block_kind(self, name: str) -> str | None:
        is_same = self.shape(name) == self._base.shape(name)
        return self._base.block_kind(name) if is_same else None

    def shape(self, name: str) -> Shape:
        shape = self._base.shape(name)
        if len(shape) > 2:
            shape = tuple(size for size in shape if size > 1) or (1,)
        if not name.endswith(".time_mix_r_k.weight"):
            return shape
        if math.prod(shape) % self._head_dim:
            raise CheckpointError(
                f"{self._file_name}: {name} is {list(shape)}, no heads of {self._head_dim}"
            )
        return (math.prod(shape) // self._head_dim, self._head_dim)


STATE_KEY, STATE_END = "blocks.{}.att.time_state", ".att.time_state"


def merged_states(files: Mapping[str, Array]) -> dict[str, Array]:
    """The matrices that are in a file of weights, where a tuned state was merged into it."""
    return {key: files[key] for key in files if key.endswith(STATE_END)}


def time_states(layers: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The matrices of a published file for each layer's S [H, N, N] as [key, value]."""
    return {
        STATE_KEY.format(layer): np.ascontiguousarray(tensors["S"].transpose(0, 2, 1))
        for layer, tensors in enumerate(layers)
    }


def read_time_states(
    files: Mapping[str, Array], name: str, config: Rwkv7Config
) -> list[dict[str, Array]]:
    """Each layer's S [H, N, N] as [key, value], float32, out of a file called ``name``.

    Raises `CheckpointError` where it is a state of a model of another shape.
    """
    heads, dim = config.num_attention_heads, config.head_dim
    wanted = {STATE_KEY.format(layer) for layer in range(config.num_hidden_layers)}
    found = {key for key in files if key.endswith(STATE_END)}
    if not found:
        raise CheckpointError(f"{name} is not a tuned state: it has no key {STATE_KEY.format(0)!r}")
    if left := sorted(set(files) - found):
        raise CheckpointError(f"{name} has an unknown key {left[0]!r} ({len(left)} in all)")
    if found != wanted:
        raise CheckpointError(
            f"{name} is a state of {len(found)} layers, and the model has {len(wanted)}"
        )
    for key in sorted(wanted):
        shape = shape_in(files, key)
        if shape != (heads, dim, dim):
            raise CheckpointError(
                f"{name}: {key} is {list(shape)}, and the model has {[heads, dim, dim]}"
            )
    return [
        {"S": np.asarray(files[STATE_KEY.format(layer)], np.float32).transpose(0, 2, 1)}
        for layer in range(config.num_hidden_layers)
    ]
