"""The keys of RWKV-7 files, and which of our weights each is."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from model.architectures.rwkv7.config import Rwkv7Config
from model.foreign.renamed import Part

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
#: Of GGUF, without the axes of one that some tensors have there; see `model.foreign.rwkv7_gguf`.
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
