"""Granite 4.0-H in its Hugging Face layout, dense, and its keys."""

from __future__ import annotations

from dataclasses import replace

from model.families.mamba.read import refuse_limit
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.foreign.hybrid_names import HybridNames, refuse_other_head, weight
from model.foreign.renamed import Part, Renamed
from model.foreign.rotary import read_rotary
from model.foreign.weights import Weights
from model.weights import file_name

# -------------------------------------------------------------------------------------------------
# The keys of the files, and which of our weights each is.

#: Of Mamba-2, in folders and in GGUF, which has A in the place of its logarithm.
FOLDER_MIXER = {
    "in.weight": weight("in_proj"),
    "conv": weight("conv1d", "squeezed"),
    "conv_bias": Part(("conv1d.bias",)),
    **{name: Part((name,)) for name in ("dt_bias", "A_log", "D")},
    "norm.weight": weight("norm"),
    "out.weight": weight("out_proj"),
}
GGUF_MIXER = {
    "in.weight": weight("ssm_in"),
    "conv": weight("ssm_conv1d"),
    "conv_bias": Part(("ssm_conv1d.bias",)),
    "dt_bias": Part(("ssm_dt.bias",)),
    "A_log": Part(("ssm_a",), "log_negative"),
    "D": Part(("ssm_d",), "column"),
    "norm.weight": weight("ssm_norm", "flattened"),
    "out.weight": weight("ssm_out"),
}


def granite_names(logits_scaling: float) -> HybridNames:
    """Those of Granite, whose logits are divided by ``logits_scaling``: here the norm before."""
    return HybridNames(
        ends={
            "embedding.weight": weight("model.embed_tokens"),
            "norm.weight": Part(("model.norm.weight",), factor=1.0 / logits_scaling),
            "head.weight": weight("lm_head"),
        },
        block="model.layers.{}",
        both={
            "mixer_norm.weight": weight("input_layernorm"),
            "mlp_norm.weight": weight("post_attention_layernorm"),
            "mlp.gate.weight": weight("shared_mlp.input_linear", "first_half"),
            "mlp.up.weight": weight("shared_mlp.input_linear", "second_half"),
            "mlp.down.weight": weight("shared_mlp.output_linear"),
        },
        attention={
            **{f"{name}.weight": weight(f"self_attn.{name}_proj") for name in "qkv"},
            "out.weight": weight("self_attn.o_proj"),
        },
        other={
            ours: replace(part, keys=(f"mamba.{part.keys[0]}",))
            for ours, part in FOLDER_MIXER.items()
        },
    )


def gguf_names(logits_scaling: float = 1.0) -> HybridNames:
    """Those of GGUF."""
    return HybridNames(
        ends={
            "embedding.weight": weight("token_embd"),
            "norm.weight": Part(("output_norm.weight",), factor=1.0 / logits_scaling),
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
        },
        other=GGUF_MIXER,
    )


# -------------------------------------------------------------------------------------------------
# The configs.


#: What kernels use, and what of experts says nothing where there are none.
HARMLESS = (
    *("mamba_chunk_size", "num_experts_per_tok", "intermediate_size", "router_aux_loss_coef"),
    *("output_router_logits", "init_method", "logits_to_keep"),
)
#: What files call the kinds of layers, and whether each is attention.
KINDS = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}


def read_granite(source: ForeignConfig, weights: Weights) -> tuple[Mamba2HybridConfig, Renamed]:
    """A folder of ``granitemoehybrid`` without experts."""
    files = weights.take_all()
    file, names = file_name(files), granite_names(source.scale("logits_scaling"))
    config = _granite(source)
    ours = Renamed(files, names.parts_of(config))
    ours.check(file, config.weight_shapes(), refuse_other_head(files, config, names, file))
    return config, ours


def _granite(source: ForeignConfig) -> Mamba2HybridConfig:
    if source.anything("num_local_experts"):
        raise ConfigError(
            f"{source.family}: num_local_experts is not supported: only the dense ones of this"
            " family are"
        )
    source.ignore(*HARMLESS)
    source.rename({"layers_block_type": "layer_types"})
    source.choice("hidden_act", "silu")
    source.choice("normalization_function", "rmsnorm")
    source.choice("attention_bias", False)
    source.choice("mamba_conv_bias", True)
    source.choice("mamba_proj_bias", False)
    refuse_limit(source, "time_step_limit")
    num_layers, vocab_size = source.num_layers("num_hidden_layers"), source.integer("vocab_size")
    width, heads = source.integer("hidden_size"), source.integer("num_attention_heads")
    head_dim = source.integer("head_dim", width // heads)
    has_positions = source.choice("position_embedding_type", None, "nope", "rope") == "rope"
    rotary = read_rotary(source, 1e4)
    inner, mamba_heads = source.integer("mamba_expand", 2) * width, source.integer("mamba_n_heads")
    return Mamba2HybridConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=num_layers,
        intermediate_size=source.integer("shared_intermediate_size", 1024),
        attention_layers=_attention_layers(source, num_layers),
        num_attention_heads=heads,
        num_key_value_heads=source.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rotary_dim=head_dim if has_positions else 0,
        rope_theta=rotary.theta,
        num_mamba_heads=mamba_heads,
        mamba_head_dim=_head_dim(source, inner, mamba_heads),
        state_size=source.integer("mamba_d_state", 256),
        num_groups=source.integer("mamba_n_groups", 1),
        conv_size=source.integer("mamba_d_conv", 4),
        embedding_scale=source.scale("embedding_multiplier"),
        residual_scale=source.scale("residual_multiplier"),
        attention_scale=source.scale("attention_multiplier"),
        norm_eps=source.number("rms_norm_eps", 1e-6),
        tied=source.boolean("tie_word_embeddings", False),
        bos_token_id=source.special_id("bos_token_id", vocab_size),
        eos_token_id=source.special_id("eos_token_id", vocab_size),
        max_context=source.integer("max_position_embeddings", 2048),
    )


def _head_dim(source: ForeignConfig, inner: int, num_heads: int) -> int:
    """That of the Mamba-2 mixers, which must make up their ``inner`` channels."""
    if inner % num_heads:
        raise ConfigError(f"{source.family}: mamba_n_heads must divide {inner}, not {num_heads}")
    source.choice("mamba_d_head", "auto", inner // num_heads)
    return inner // num_heads


def _attention_layers(source: ForeignConfig, num_layers: int) -> tuple[int, ...]:
    """Those of ``layer_types``; none where there is no such field."""
    found = source.anything("layer_types")
    if found is None:
        return ()
    if not isinstance(found, list) or any(str(kind) not in KINDS for kind in found):
        known = " and ".join(map(repr, KINDS))
        raise ConfigError(
            f"{source.family}: layer_types must be a list of {known}, not {found!r:.200}"
        )
    if len(found) != num_layers:
        raise ConfigError(f"{source.family}: layer_types has {len(found)} of {num_layers} layers")
    return tuple(layer for layer, kind in enumerate(found) if KINDS[kind])
