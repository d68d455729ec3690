"""Granite 4.0-H, Nemotron-H and Falcon-H1 in their Hugging Face layouts, dense."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from model.families.mamba.read import refuse_limit
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.mamba2_hybrid.names import (
    Mamba2HybridNames,
    Multipliers,
    falcon_names,
    granite_names,
    nemotron_names,
)
from model.files import ConfigError
from model.foreign.config import ForeignConfig
from model.foreign.hybrid_names import refuse_other_head
from model.foreign.renamed import Part, Renamed
from model.foreign.rotary import read_rotary
from model.foreign.weights import Weights
from model.weights import Array, file_name

Read = tuple[Mamba2HybridConfig, Renamed]

#: What kernels use, and what training starts from.
HARMLESS = (
    *("mamba_chunk_size", "chunk_size", "use_mamba_kernels", "num_logits_to_keep"),
    *("logits_to_keep", "residual_in_fp32", "rescale_prenorm_residual", "init_method"),
    *("time_step_min", "time_step_max", "time_step_floor", "mamba_ssm_cache_dtype"),
    *("mlp_expansion_factor", "router_aux_loss_coef", "output_router_logits"),
)
#: What is said of experts where there are none, and of the prediction of several tokens.
EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_latent_size"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "num_experts_per_tok"),
    *("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"),
    *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
)
#: What files call the kinds of layers, in lists and in the letters of a pattern.
KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "M": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "*": "attention",
    "mlp": "mlp",
    "-": "mlp",
    "moe": "moe",
    "E": "moe",
}
#: The fields that say it: lists, and a pattern of letters.
PATTERNS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
DENSE_ALONE = "only the dense ones of this family are"


def read_granite(source: ForeignConfig, weights: Weights) -> Read:
    """A folder of ``granitemoehybrid`` without experts."""
    files, names = weights.take_all(), granite_names(source.scale("logits_scaling"))
    return _read(files, _granite(source), names)


def read_nemotron(source: ForeignConfig, weights: Weights) -> Read:
    """A folder of ``nemotron_h`` without experts."""
    files = weights.take_all()
    prefix = "backbone" if "backbone.embeddings.weight" in files else "model"
    return _read(files, _nemotron(source), nemotron_names(prefix))


def read_falcon_h1(source: ForeignConfig, weights: Weights) -> Read:
    """A folder of ``falcon_h1``."""
    files, by = weights.take_all(), _multipliers(source)
    config = _falcon_h1(source)
    return _read(files, config, falcon_names(config, by))


def key_layouts(config: Mamba2HybridConfig) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them.

    Without Granite's last norm, in which its logits are divided. Raises `ConfigError` for a
    Falcon-H1, whose multipliers are in its weights.
    """
    if any(map(operator.and_, config.is_attention, config.is_mamba)):
        raise ConfigError("--lora is not for falcon_h1 models: merge the adapter with peft")
    if not config.ends_with_mlp:
        return [nemotron_names(prefix).parts_of(config) for prefix in ("model", "backbone")]
    parts = granite_names(1.0).parts_of(config)
    del parts["norm.weight"]
    return [parts]


def _read(files: Mapping[str, Array], config: Mamba2HybridConfig, names: Mamba2HybridNames) -> Read:
    file = file_name(files)
    unused = {key for key in files if key.startswith("mtp.")}
    unused |= refuse_other_head(files, config, names, file)
    ours = Renamed(files, names.parts_of(config))
    ours.check(file, config.weight_shapes(), unused)
    return config, ours


def _granite(source: ForeignConfig) -> Mamba2HybridConfig:
    if source.anything("num_local_experts"):
        raise ConfigError(f"{source.family}: num_local_experts is not supported: {DENSE_ALONE}")
    source.ignore("intermediate_size", "num_experts_per_tok")  # of experts
    source.choice("normalization_function", "rmsnorm")
    source.choice("mamba_d_ssm", None)
    has_positions = source.choice("position_embedding_type", None, "nope", "rope") == "rope"
    kinds = kinds_of_layers(source, "mamba", "attention")
    shared = _shared(source, kinds, has_positions)
    return Mamba2HybridConfig(
        **shared,
        **_mamba(source, shared["hidden_size"]),
        intermediate_size=source.integer("shared_intermediate_size", 1024),
        embedding_scale=source.scale("embedding_multiplier"),
        residual_scale=source.scale("residual_multiplier"),
        attention_scale=source.scale("attention_multiplier"),
        norm_eps=source.number("rms_norm_eps", 1e-6),
        max_context=source.integer("max_position_embeddings", 2048),
    )


def _nemotron(source: ForeignConfig) -> Mamba2HybridConfig:
    source.ignore(*EXPERTS, "expand")
    source.rename({"attention_head_dim": "head_dim", "rms_norm_eps": "layer_norm_epsilon"})
    source.rename({"mlp_hidden_act": "hidden_act"})
    source.choice("mamba_hidden_act", "silu")
    source.choice("sliding_window", None)
    for name in ("mlp_bias", "use_bias", "mamba_proj_bias"):
        source.choice(name, False)
    source.choice("use_conv_bias", True)
    kinds = kinds_of_layers(source, "mamba", "attention", "mlp")
    if "mlp" not in kinds:
        raise ConfigError(f"{source.family}: layers_block_type must have a layer that is an mlp")
    shared = _shared(source, kinds, False, "relu2")
    return Mamba2HybridConfig(
        **shared,
        intermediate_size=source.integer("intermediate_size"),
        num_mamba_heads=source.integer("mamba_num_heads", 128),
        mamba_head_dim=source.integer("mamba_head_dim", 64),
        state_size=source.integer("ssm_state_size", 128),
        num_groups=source.integer("n_groups", 8),
        conv_size=source.integer("conv_kernel", 4),
        norm_eps=source.number("layer_norm_epsilon", 1e-5),
        max_context=source.integer("max_position_embeddings", 4096),
    )


def _falcon_h1(source: ForeignConfig) -> Mamba2HybridConfig:
    source.choice("attn_layer_indices", None)
    source.choice("mamba_use_mlp", True)
    source.choice("mlp_bias", False)
    source.choice("projectors_bias", False)
    num_layers = source.num_layers("num_hidden_layers")
    has_norm = source.boolean("mamba_rms_norm", False)
    is_before = source.boolean("mamba_norm_before_gate", True)
    if has_norm and is_before:
        raise ConfigError(f"{source.family}: mamba_norm_before_gate is not supported")
    shared = _shared(source, ["attention"] * num_layers, True)
    shared["mamba_layers"] = shared["attention_layers"]  # all have both
    return Mamba2HybridConfig(
        **shared,
        **_mamba(source, shared["hidden_size"]),
        intermediate_size=source.integer("intermediate_size"),
        mixer_norm=has_norm,
        embedding_scale=source.scale("embedding_multiplier"),
        norm_eps=source.number("rms_norm_eps", 1e-5),
        max_context=source.integer("max_position_embeddings", 8192),
    )


def _shared(
    source: ForeignConfig, kinds: list[str], has_positions: bool, activation: str = "silu"
) -> dict[str, Any]:
    """What all say in the same way."""
    source.ignore(*HARMLESS)
    source.choice("hidden_act", activation)
    source.choice("attention_bias", False)
    refuse_limit(source, "time_step_limit")
    vocab_size, width = source.integer("vocab_size"), source.integer("hidden_size")
    heads = source.integer("num_attention_heads")
    head_dim, rotary = source.integer("head_dim", width // heads), read_rotary(source, 1e4)
    layers = {
        f"{name}_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == name)
        for name in ("attention", "mamba")
    }
    return {
        **layers,
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": heads,
        "num_key_value_heads": source.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "rotary_dim": head_dim if has_positions else 0,
        "rope_theta": rotary.theta,
        "tied": source.boolean("tie_word_embeddings", False),
        "bos_token_id": source.special_id("bos_token_id", vocab_size),
        "eos_token_id": source.special_id("eos_token_id", vocab_size),
    }


def _mamba(source: ForeignConfig, width: int) -> dict[str, Any]:
    """The sizes of Mamba-2 where their names begin with it."""
    source.choice("mamba_conv_bias", True)
    source.choice("mamba_proj_bias", False)
    inner = source.integer("mamba_expand", 2) * width
    inner = source.integer("mamba_d_ssm", inner)
    heads = source.integer("mamba_n_heads", 128)
    if inner % heads:
        raise ConfigError(f"{source.family}: mamba_n_heads must divide {inner}, not {heads}")
    source.choice("mamba_d_head", "auto", inner // heads)
    return {
        "num_mamba_heads": heads,
        "mamba_head_dim": inner // heads,
        "state_size": source.integer("mamba_d_state", 256),
        "num_groups": source.integer("mamba_n_groups", 1),
        "conv_size": source.integer("mamba_d_conv", 4),
    }


def _multipliers(source: ForeignConfig) -> Multipliers:
    return Multipliers(
        head=source.number("lm_head_multiplier", 1.0),
        attention_in=source.number("attention_in_multiplier", 1.0),
        attention_out=source.number("attention_out_multiplier", 1.0),
        key=source.number("key_multiplier", 1.0),
        ssm_in=source.number("ssm_in_multiplier", 1.0),
        ssm_out=source.number("ssm_out_multiplier", 1.0),
        ssm=_numbers(source, "ssm_multipliers", 5),
        mlp=_numbers(source, "mlp_multipliers", 2),
    )


def _numbers(source: ForeignConfig, name: str, count: int) -> tuple[float, ...]:
    """A list of so many numbers; ones where it is missing."""
    found = source.anything(name)
    found = [1.0] * count if found is None else found
    if not isinstance(found, list) or len(found) != count:
        raise ConfigError(f"{source.family}: {name} must be {count} numbers, not {found!r:.80}")
    return tuple(source.as_number(name, value) for value in found)


def _kinds_in(found: Any) -> list[str]:
    """Those of a list or a pattern of letters; "" for an unknown one."""
    return [KINDS.get(str(kind), "") for kind in (found if isinstance(found, list) else str(found))]


def kinds_of_layers(source: ForeignConfig, *known: str) -> list[str]:
    """What each layer is, of ``known``; a Mamba where no field of `PATTERNS` says it."""
    present = [name for name in PATTERNS if name in source]
    if not present:
        return ["mamba"] * source.num_layers("num_hidden_layers")
    name, found = present[0], source.anything(present[0])
    kinds = _kinds_in(found)
    for other in present[1:]:
        if _kinds_in(source.anything(other)) != kinds:
            raise ConfigError(f"{source.family}: {other} says other kinds of layers than {name}")
    source.ignore(*PATTERNS)
    if "moe" in kinds:
        raise ConfigError(f"{source.family}: {name} with experts is not supported: {DENSE_ALONE}")
    if not set(kinds) <= set(known):
        names = ", ".join(repr(kind) for kind, ours in KINDS.items() if ours in known)
        raise ConfigError(f"{source.family}: {name} must be a list of {names}, not {found!r:.200}")
    num_layers = source.num_layers("num_hidden_layers", len(kinds))
    if len(kinds) != num_layers:
        raise ConfigError(f"{source.family}: {name} has {len(kinds)} of {num_layers} layers")
    return kinds
