"""ARWKV as it is published: folders of the type ``rwkv_hybrid``, and GGUF.

A folder's config is Qwen2's and says of its attention what the donor had; the numbers of heads and
the ranks are those of the weights. The low-rank matrices are [in, out]. Files may have an ``x_g``
without a gate, and values to mix into the first layer, which nothing computes with.

GGUF (``arwkv7``, as llama.cpp's converter writes it) is as RWKV-7's, but the token shift has five
rows where there is no gate, whose rank is 0 then. The head is always there, also where it is the
embedding again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from model.families.rwkv7.config import Arwkv7Config
from model.families.rwkv7.read import (
    BOS,
    EOS,
    GGUF_HARMLESS,
    GROUP_NORM_EPS,
    INPUTS,
    TimeMixNames,
    TimeMixTensors,
    affine,
    agree,
    in_block,
    metadata_of,
    time_mix_parts,
    time_mix_sizes,
    unused_values,
)
from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.foreign.weights import KeyShapes, Part, Renamed, Weights
from model.weights import Array, file_name
from model.weights.gguf_file import GgufFile

#: Of the donor's attention, which is not there, and of training.
HARMLESS = (
    *("num_attention_heads", "num_key_value_heads", "attention_dropout", "max_window_layers"),
    *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
    *("sliding_window", "use_sliding_window", "layer_types"),
)


@dataclass(frozen=True)
class Names(TimeMixNames):
    """The keys of one kind of file of ARWKV."""

    embedding: str
    head: str
    norm: str
    #: Of a block, our names -> theirs, without ``weight`` and ``bias``.
    modules: Mapping[str, str]


_MIX = "self_attn.time_mixer"
FOLDER = Names(
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    norm="model.norm.weight",
    block="model.layers.{}",
    shift_mix=Part(tuple(f"{_MIX}.x_{letter}" for letter in INPUTS), "flat"),
    vectors=(f"{_MIX}.k_k", f"{_MIX}.k_a", f"{_MIX}.r_k"),
    low_rank=(_MIX + ".{}1", _MIX + ".{}2", _MIX + ".{}0"),
    low_rank_form="transposed",
    modules={
        "mixer_norm": "input_layernorm",
        "mixer.receptance": f"{_MIX}.receptance",
        "mixer.key": f"{_MIX}.key",
        "mixer.value": f"{_MIX}.value",
        "mixer.output": f"{_MIX}.output",
        "mixer.group_norm": f"{_MIX}.ln_x",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)


def read_arwkv7(source: ForeignConfig, weights: Weights) -> tuple[Arwkv7Config, Renamed]:
    """The model in a folder: see the module's docstring."""
    source.ignore(*HARMLESS)
    source.choice("wkv_version", 7)
    source.choice("hidden_act", "silu")
    source.choice("wkv_has_shift", True)
    source.choice("wkv_layers", "full", None)
    files = weights.take_all()
    name = file_name(files)
    config = sizes(files, name, FOLDER)
    _check(source, config)
    divisor = source.integer("head_size_divisor", 8)
    config = replace(
        config,
        tied=source.boolean("tie_word_embeddings", False),
        norm_eps=source.number("rms_norm_eps", 1e-6),
        group_norm_eps=1e-5 * divisor**2,
        bos_token_id=source.special_id("bos_token_id", config.vocab_size),
        eos_token_id=source.special_id("eos_token_id", config.vocab_size),
    )
    unused = set() if config.gate_rank else _unused_gates(config)
    return config, renamed(files, name, config, FOLDER, unused)


def _unused_gates(config: Arwkv7Config) -> set[str]:
    layers = range(config.num_hidden_layers)
    return {f"{FOLDER.block.format(layer)}.{_MIX}.x_g" for layer in layers}


def _check(source: ForeignConfig, config: Arwkv7Config) -> None:
    """Raises `ConfigError` where ``config.json`` says something else than the weights."""
    for field, found in (
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.hidden_size),
        ("num_hidden_layers", config.num_hidden_layers),
        ("intermediate_size", config.intermediate_size),
        ("head_size", config.head_dim),
        ("num_wkv_heads", config.num_attention_heads),
    ):
        if (says := source.integer(field, found)) != found:
            raise ConfigError(f"{source.family}: {field} is {says}, the weights have {found}")
    for flag, key, found in (
        ("wkv_has_gate", "g1", config.gate_rank > 0),
        ("wkv_has_group_norm", "ln_x", config.group_norm),
    ):
        if source.boolean(flag, found) != found:
            have = "have" if found else "lack"
            raise ConfigError(f"{source.family}: {flag} is {not found}, the weights {have} {key}")


def sizes(files: Mapping[str, Array], name: str, names: Names) -> Arwkv7Config:
    """The config, from the shapes of the weights; what these do not show is left at its default."""
    shape = KeyShapes(files, name)
    num_layers = shape.num_layers(names.block)
    vocab_size, width = shape(names.embedding)
    first = names.block.format(0)
    has_gate = f"{first}.{names.low_rank[0].format('g')}" in files
    ranks = time_mix_sizes(shape, names, width, num_layers, "wavg" if has_gate else "wav")
    return Arwkv7Config(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=num_layers,
        intermediate_size=shape(f"{first}.{names.modules['mlp.gate']}.weight")[0],
        group_norm=f"{first}.{names.modules['mixer.group_norm']}.weight" in files,
        **ranks,
    )


def renamed(
    files: Mapping[str, Array], name: str, config: Arwkv7Config, names: Names, unused: Set[str]
) -> Renamed:
    """The weights, of which each key is there, has its shape, and none but ``unused`` is left."""
    weights = Renamed(files, _parts_of(config, names))
    head = {names.head} if config.tied else set()
    weights.check(name, config.weight_shapes(), unused_values(names) | head | unused)
    return weights


def key_layouts(config: Arwkv7Config) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them."""
    return [_parts_of(config, FOLDER)]


def _parts_of(config: Arwkv7Config, names: Names) -> dict[str, Part]:
    """Where each weight that ``config`` lists is, by our names."""
    ends = {
        "embedding.weight": Part((names.embedding,)),
        "head.weight": Part((names.head,)),
        "norm.weight": Part((names.norm,)),
    }
    block = {f"mixer.{ours}": part for ours, part in time_mix_parts(names).items()}
    for ours, theirs in names.modules.items():
        block |= affine(ours, theirs)
    if not config.gate_rank and len(names.shift_mix.keys) > 1:
        block["mixer.shift_mix"] = replace(names.shift_mix, keys=names.shift_mix.keys[:-1])
    return {
        ours: ends[ours] if ours in ends else in_block(ours, block, names)
        for ours in config.weight_shapes()
    }


GGUF_PREFIX = "arwkv7."
GGUF = Names(
    embedding="token_embd.weight",
    head="output.weight",
    norm="output_norm.weight",
    block="blk.{}",
    shift_mix=Part(("time_mix_lerp_fused.weight",)),
    vectors=("time_mix_k_k.weight", "time_mix_k_a.weight", "time_mix_r_k.weight"),
    low_rank=("time_mix_{}1.weight", "time_mix_{}2.weight", "time_mix_{}0.weight"),
    low_rank_form="same",
    modules={
        "mixer_norm": "attn_norm",
        "mixer.receptance": "time_mix_receptance",
        "mixer.key": "time_mix_key",
        "mixer.value": "time_mix_value",
        "mixer.output": "time_mix_output",
        "mixer.group_norm": "time_mix_ln",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "ffn_gate",
        "mlp.up": "ffn_up",
        "mlp.down": "ffn_down",
    },
)


def read_gguf(file: GgufFile, name: str) -> tuple[Arwkv7Config, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    source = metadata_of(file, name, GGUF_PREFIX)
    source.ignore(*(GGUF_PREFIX + field for field in GGUF_HARMLESS))
    source.choice(f"{GGUF_PREFIX}token_shift_count", 1)
    source.choice(f"{GGUF_PREFIX}rescale_every_n_layers", 0)
    tensors = TimeMixTensors(file, name, source.integer(f"{GGUF_PREFIX}wkv.head_size"))
    config = sizes(tensors, name, GGUF)
    gate_rank = f"{GGUF_PREFIX}attention.gate_lora_rank"
    if not config.gate_rank:
        source.choice(gate_rank, 0)
        wanted = {}
    else:
        wanted = {gate_rank: config.gate_rank}
    wanted |= {
        f"{GGUF_PREFIX}block_count": config.num_hidden_layers,
        f"{GGUF_PREFIX}embedding_length": config.hidden_size,
        f"{GGUF_PREFIX}feed_forward_length": config.intermediate_size,
        f"{GGUF_PREFIX}attention.decay_lora_rank": config.decay_rank,
        f"{GGUF_PREFIX}attention.iclr_lora_rank": config.rate_rank,
    }
    value_rank = f"{GGUF_PREFIX}attention.value_residual_mix_lora_rank"
    if config.num_hidden_layers > 1:
        wanted[value_rank] = config.value_rank
    else:
        source.ignore(value_rank)
    for key, size in wanted.items():
        agree(source, key, source.integer(key), size)
    size = config.vocab_size
    agree(
        source, f"{GGUF_PREFIX}vocab_size", source.integer(f"{GGUF_PREFIX}vocab_size", size), size
    )
    config = replace(
        config,
        norm_eps=source.number(f"{GGUF_PREFIX}attention.layer_norm_rms_epsilon", 1e-6),
        group_norm_eps=GROUP_NORM_EPS,
        bos_token_id=source.special_id(BOS, size),
        eos_token_id=source.special_id(EOS, size),
    )
    source.refuse_unknown()
    return config, renamed(tensors, name, config, GGUF, set())
