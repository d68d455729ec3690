"""LFM2 and LFM2.5, dense, in their Hugging Face layout and in llama.cpp's GGUF, and their keys."""

from __future__ import annotations

import math

from model.families.lfm2.config import Lfm2Config
from model.files import ConfigError
from model.foreign import hybrid_names
from model.foreign.config import ForeignConfig, read_decoder, read_rotary
from model.foreign.gguf import GgufSource
from model.foreign.hybrid_names import folder_names, weight, weights_of
from model.foreign.layer_kinds import attention_layers
from model.foreign.weights import Part, Renamed, Weights
from model.weights.gguf_file import GgufFile

# -------------------------------------------------------------------------------------------------
# The keys of LFM2 files, and which of our weights each is.


_MLP = {"mlp.gate": "feed_forward.w1", "mlp.up": "feed_forward.w3", "mlp.down": "feed_forward.w2"}
FOLDER = folder_names().but(
    ends={"norm.weight": weight("model.embedding_norm")},
    both=weights_of({"mixer_norm": "operator_norm", "mlp_norm": "ffn_norm", **_MLP}),
    attention=weights_of(
        {
            "out": "self_attn.out_proj",
            "q_norm": "self_attn.q_layernorm",
            "k_norm": "self_attn.k_layernorm",
        }
    ),
    other={
        **weights_of({"in": "conv.in_proj", "out": "conv.out_proj"}),
        "conv": weight("conv.conv", "squeezed"),
    },
)

GGUF = hybrid_names.GGUF.but(
    ends={"norm.weight": weight("token_embd_norm")},
    other={
        **weights_of({"in": "shortconv.in_proj", "out": "shortconv.out_proj"}),
        "conv": weight("shortconv.conv", "squeezed"),
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
    config = _config(source)
    return config, FOLDER.read(weights.take_all(), config)


def key_layouts(config: Lfm2Config) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them."""
    return [FOLDER.parts_of(config)]


def _config(source: ForeignConfig) -> Lfm2Config:
    source.ignore(*HARMLESS)
    source.rename({"tie_embedding": "tie_word_embeddings"})
    source.only(conv_bias=False, block_use_swiglu=True, use_pos_enc=True)
    usual = {"num_key_value_heads": 8, "max_position_embeddings": 128_000}
    usual["intermediate_size"] = _inner(source)
    sizes = read_decoder(source, ("norm_eps", 1e-5), usual, tied=True)
    return Lfm2Config(
        **sizes,
        attention_layers=_attention_layers(source, sizes["num_hidden_layers"]),
        rope_theta=read_rotary(source, 1e6).theta,
        conv_size=source.integer("conv_L_cache", 3),
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
    return config, GGUF.read(file, config, name=name)


def _gguf_config(source: GgufSource, file: GgufFile) -> Lfm2Config:
    if "attention.sliding_window" in source:
        raise ConfigError(
            f"{source.family}: attention.sliding_window is not supported: it is of models that hear"
        )
    config = Lfm2Config(
        **source.decoder(file, theta=1e6),
        intermediate_size=source.integer("feed_forward_length"),
        conv_size=source.integer("shortconv.l_cache"),
    )
    source.agree("rope.dimension_count", config.head_dim)
    source.refuse_unknown()
    return config
