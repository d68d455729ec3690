"""LFM2 and LFM2.5, dense, in their Hugging Face layout and in llama.cpp's GGUF, and their keys."""

from __future__ import annotations

import math

from model.families.lfm2.config import Lfm2Config
from model.files import ConfigError
from model.foreign.config import ForeignConfig, read_rotary
from model.foreign.gguf import GgufSource
from model.foreign.hybrid_names import HybridNames, attention_layers, refuse_other_head, weight
from model.foreign.weights import Part, Renamed, Weights
from model.weights import file_name
from model.weights.gguf_file import GgufFile

# -------------------------------------------------------------------------------------------------
# The keys of LFM2 files, and which of our weights each is.


FOLDER = HybridNames(
    ends={
        "embedding.weight": weight("model.embed_tokens"),
        "norm.weight": weight("model.embedding_norm"),
        "head.weight": weight("lm_head"),
    },
    block="model.layers.{}",
    both={
        "mixer_norm.weight": weight("operator_norm"),
        "mlp_norm.weight": weight("ffn_norm"),
        "mlp.gate.weight": weight("feed_forward.w1"),
        "mlp.up.weight": weight("feed_forward.w3"),
        "mlp.down.weight": weight("feed_forward.w2"),
    },
    attention={
        **{f"{name}.weight": weight(f"self_attn.{name}_proj") for name in "qkv"},
        "out.weight": weight("self_attn.out_proj"),
        "q_norm.weight": weight("self_attn.q_layernorm"),
        "k_norm.weight": weight("self_attn.k_layernorm"),
    },
    other={
        "in.weight": weight("conv.in_proj"),
        "conv": weight("conv.conv", "squeezed"),
        "out.weight": weight("conv.out_proj"),
    },
)

GGUF = HybridNames(
    ends={
        "embedding.weight": weight("token_embd"),
        "norm.weight": weight("token_embd_norm"),
        "head.weight": weight("output"),
    },
    block="blk.{}",
    both={
        "mixer_norm.weight": weight("attn_norm"),
        "mlp_norm.weight": weight("ffn_norm"),
        **{f"mlp.{name}.weight": weight(f"ffn_{name}") for name in ("gate", "up", "down")},
    },
    attention={
        **{f"{name}.weight": weight(f"attn_{name}") for name in "qkv"},
        "out.weight": weight("attn_output"),
        "q_norm.weight": weight("attn_q_norm"),
        "k_norm.weight": weight("attn_k_norm"),
    },
    other={
        "in.weight": weight("shortconv.in_proj"),
        "conv": weight("shortconv.conv", "squeezed"),
        "out.weight": weight("shortconv.out_proj"),
    },
)


#: What training starts from, and second names of sizes, which the weights' shapes show.
HARMLESS = (
    *("block_dim", "block_norm_eps", "block_mlp_init_scale", "block_out_init_scale"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
)
KINDS = ("conv", "full_attention")


def read_lfm2(source: ForeignConfig, weights: Weights) -> tuple[Lfm2Config, Renamed]:
    """See the module's docstring."""
    files = weights.take_all()
    file, config = file_name(files), _config(source)
    ours = Renamed(files, FOLDER.parts_of(config))
    ours.check(file, config.weight_shapes(), refuse_other_head(files, config, FOLDER, file))
    return config, ours


def key_layouts(config: Lfm2Config) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them."""
    return [FOLDER.parts_of(config)]


def _config(source: ForeignConfig) -> Lfm2Config:
    source.ignore(*HARMLESS)
    source.rename({"tie_embedding": "tie_word_embeddings"})
    source.choice("conv_bias", False)
    source.choice("block_use_swiglu", True)
    source.choice("use_pos_enc", True)
    num_layers, vocab_size = source.num_layers("num_hidden_layers"), source.integer("vocab_size")
    width, heads = source.integer("hidden_size"), source.integer("num_attention_heads")
    return Lfm2Config(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=num_layers,
        intermediate_size=_inner(source),
        attention_layers=_attention_layers(source, num_layers),
        num_attention_heads=heads,
        num_key_value_heads=source.integer("num_key_value_heads", 8),
        head_dim=source.integer("head_dim", width // heads),
        rope_theta=read_rotary(source, 1e6).theta,
        conv_size=source.integer("conv_L_cache", 3),
        norm_eps=source.number("norm_eps", 1e-5),
        tied=source.boolean("tie_word_embeddings", True),
        bos_token_id=source.special_id("bos_token_id", vocab_size),
        eos_token_id=source.special_id("eos_token_id", vocab_size),
        max_context=source.integer("max_position_embeddings", 128_000),
    )


def _inner(source: ForeignConfig) -> int:
    """The width inside the MLP: by default two thirds of a number, in whole multiples."""
    given = source.integer("intermediate_size", 12_288)
    inner = source.integer("block_ff_dim", given)
    multiple = source.integer("block_multiple_of", 256)
    factor = source.number("block_ffn_dim_multiplier", 1.0)
    if not source.boolean("block_auto_adjust_ff_dim", True):
        return inner
    return multiple * math.ceil(int(factor * int(2 * inner / 3)) / multiple)


def _attention_layers(source: ForeignConfig, num_layers: int) -> tuple[int, ...]:
    """Those of ``layer_types``, else of ``full_attn_idxs``, else all."""
    indices = source.anything("full_attn_idxs")
    if "layer_types" in source or indices is None:
        return attention_layers(source, num_layers, KINDS, 1)
    if not isinstance(indices, list):
        raise ConfigError(f"{source.family}: full_attn_idxs must be a list, not {indices!r:.80}")
    source.ignore("layer_types")
    return tuple(indices)


def read_gguf(file: GgufFile, name: str) -> tuple[Lfm2Config, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    config = _gguf_config(GgufSource(file, name, "lfm2"), file)
    weights = Renamed(file, GGUF.parts_of(config))
    weights.check(name, config.weight_shapes(), frozenset())
    return config, weights


def _gguf_config(source: GgufSource, file: GgufFile) -> Lfm2Config:
    if "attention.sliding_window" in source:
        raise ConfigError(
            f"{source.family}: attention.sliding_window is not supported: it is of models that hear"
        )
    config = Lfm2Config(
        **source.decoder(file),
        intermediate_size=source.integer("feed_forward_length"),
        rope_theta=source.number("rope.freq_base", 1e6),
        conv_size=source.integer("shortconv.l_cache"),
        norm_eps=source.number("attention.layer_norm_rms_epsilon", 1e-5),
    )
    source.agree("rope.dimension_count", config.head_dim)
    source.refuse_unknown()
    return config
