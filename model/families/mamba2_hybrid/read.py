"""Granite, Nemotron-H and Falcon-H1, dense, in folders and in GGUF, and their keys.

A Granite is a 4.0-H, or has attention alone, as 3.x have and the other 4.0. Folders are of Hugging
Face's layouts, GGUF as llama.cpp's converter writes it: of the first two the rows of q and k lie in
pairs, also where a model has no positions. Falcon-H1's multipliers are those of the weights
already.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from model.families.mamba.read import FOLDER_MIXER, refuse_limit
from model.families.mamba.read import GGUF as MAMBA_GGUF
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.files import ConfigError
from model.foreign.config import ForeignConfig, read_decoder, read_rotary
from model.foreign.gguf import GgufSource, PairedRows
from model.foreign.hybrid_names import (
    FEED_FORWARD_FOLDER,
    FOLDER_ATTENTION,
    HybridNames,
    Parts,
    folder_names,
    inside,
    weight,
    weights_of,
)
from model.foreign.layer_kinds import layers_of, mamba_kinds
from model.foreign.weights import Factor, Part, Renamed, Weights
from model.weights.gguf_file import GgufFile

Read = tuple[Mamba2HybridConfig, Renamed]

#: The MLP of a Granite that is a hybrid, in folders: two matrices in one.
STACKED_MLP = {
    "mlp.gate.weight": weight("shared_mlp.input_linear", "first_half"),
    "mlp.up.weight": weight("shared_mlp.input_linear", "second_half"),
    "mlp.down.weight": weight("shared_mlp.output_linear"),
}


def granite_names(logits_scaling: float, mlp: Parts) -> HybridNames:
    """Those of Granite, whose logits are divided by ``logits_scaling``: here the norm before."""
    return folder_names().but(
        ends={"norm.weight": Part(("model.norm.weight",), factor=1.0 / logits_scaling)},
        both=mlp,
        other=inside("mamba", FOLDER_MIXER),
    )


def nemotron_names(prefix: str) -> HybridNames:
    """Those of Nemotron-H, where an MLP is a mixer; all but the head begin with ``prefix``."""
    mlp = weights_of({"up": "up_proj", "down": "down_proj"})
    return folder_names(f"{prefix}.").but(
        ends=weights_of({"embedding": f"{prefix}.embeddings", "norm": f"{prefix}.norm_f"}),
        both={"mixer_norm.weight": weight("norm")},
        attention=inside("mixer", FOLDER_ATTENTION),
        other=inside("mixer", FOLDER_MIXER | mlp),
    )


def _parallel(attention: Parts, mamba: Parts) -> dict[str, Part]:
    """Those of two mixers in one layer, which have theirs in front of our names."""
    both = {f"attention.{ours}": part for ours, part in attention.items()}
    return both | {f"mamba.{ours}": part for ours, part in mamba.items()}


def falcon_names(source: ForeignConfig, config: Mamba2HybridConfig) -> HybridNames:
    """Those of Falcon-H1, whose multipliers are those of the weights here."""
    factors = _multipliers(source, config)

    def times(parts: Parts) -> dict[str, Part]:
        return {ours: replace(p, factor=factors.get(ours, 1.0)) for ours, p in parts.items()}

    names, mamba = FEED_FORWARD_FOLDER, inside("mamba", FOLDER_MIXER)
    mixers = times(_parallel(names.attention, mamba))
    return replace(names, ends=times(names.ends), both=times(names.both), other=mixers)


def _multipliers(source: ForeignConfig, config: Mamba2HybridConfig) -> dict[str, Factor]:
    """What the numbers of weights are multiplied with; of ``in`` the rows of z, x, B, C and dt."""

    def number(name: str) -> float:
        return source.number(f"{name}_multiplier", 1.0)

    mamba, of_attention, of_mamba = config.mamba, number("attention_in"), number("ssm_in")
    inner, writes = mamba.inner_size, mamba.num_groups * mamba.state_size
    rows = (inner, inner, writes, writes, mamba.num_attention_heads)
    parts = zip(_numbers(source, "ssm_multipliers", 5), rows, strict=True)
    gate, down = _numbers(source, "mlp_multipliers", 2)
    return {
        "norm.weight": number("lm_head"),
        "mlp.gate.weight": gate,
        "mlp.down.weight": down,
        "attention.q.weight": of_attention,
        "attention.k.weight": of_attention * number("key"),
        "attention.v.weight": of_attention,
        "attention.out.weight": number("attention_out"),
        "mamba.in.weight": tuple(of_mamba * each for each, num in parts for _ in range(num)),
        "mamba.out.weight": number("ssm_out"),
    }


def _numbers(source: ForeignConfig, name: str, count: int) -> tuple[float, ...]:
    """A list of so many numbers; ones where it is missing."""
    found = source.anything(name)
    found = [1.0] * count if found is None else found
    if not isinstance(found, list) or len(found) != count:
        raise ConfigError(f"{source.family}: {name} must be {count} numbers, not {found!r:.80}")
    return tuple(source.as_number(name, value) for value in found)


def gguf_names(logits_scaling: float = 1.0, mlp_norm: str = "ffn_norm.weight") -> HybridNames:
    """Those of GGUF, where Falcon-H1 has another name for one norm."""
    return MAMBA_GGUF.but(
        ends={"norm.weight": Part(("output_norm.weight",), factor=1.0 / logits_scaling)},
        both={"mlp_norm.weight": Part((mlp_norm,))},
        other={
            **weights_of({"up": "ffn_up", "down": "ffn_down"}),
            **_parallel(MAMBA_GGUF.attention, MAMBA_GGUF.other),
        },
    )


def key_layouts(config: Mamba2HybridConfig) -> list[dict[str, Part]]:
    """The keys of adapters' files, as `model.foreign.lora` asks for them.

    Without Granite's last norm, in which its logits are divided. Raises `ConfigError` for a
    Falcon-H1, whose multipliers are in its weights.
    """
    if any(map(operator.and_, config.is_attention, config.is_mamba)):
        raise ConfigError("--lora is not for falcon_h1 models: merge the adapter with peft")
    if not config.ends_with_mlp:
        return [nemotron_names(prefix).parts_of(config) for prefix in ("model", "backbone")]
    mlps = [STACKED_MLP] if any(config.is_mamba) else [{}, STACKED_MLP]
    layouts = [granite_names(1.0, mlp).parts_of(config) for mlp in mlps]
    for parts in layouts:
        del parts["norm.weight"]
    return layouts


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
#: The tensors of such a prediction, which are left out.
MTP = re.compile(r"mtp\..*")


def read_granite(source: ForeignConfig, weights: Weights) -> Read:
    """A folder of ``granite``, whose layers are all attention."""
    source.only(mlp_bias=False)
    kinds = ["attention"] * source.num_layers("num_hidden_layers")
    config = Mamba2HybridConfig(**_granite(source, kinds))
    names = granite_names(source.scale("logits_scaling"), {})
    return config, names.read(weights.take_all(), config, MTP)


def read_granite_hybrid(source: ForeignConfig, weights: Weights) -> Read:
    """A folder of ``granitemoehybrid`` without experts."""
    source.refuse_experts("num_local_experts", source.anything("num_local_experts"))
    source.ignore("intermediate_size", "num_experts_per_tok")  # of experts
    inner = source.integer("shared_intermediate_size", 1024)
    source.only(normalization_function="rmsnorm", mamba_d_ssm=None)
    has_positions = source.choice("position_embedding_type", None, "nope", "rope") == "rope"
    kinds = mamba_kinds(source, "mamba", "attention")
    sizes = _granite(source, kinds, has_positions, intermediate_size=inner)
    config = Mamba2HybridConfig(**sizes, **_mamba(source, sizes["hidden_size"]))
    names = granite_names(source.scale("logits_scaling"), STACKED_MLP)
    return config, names.read(weights.take_all(), config, MTP)


def read_nemotron(source: ForeignConfig, weights: Weights) -> Read:
    """A folder of ``nemotron_h`` without experts."""
    source.ignore(*EXPERTS, "expand")
    source.rename({"attention_head_dim": "head_dim", "rms_norm_eps": "layer_norm_epsilon"})
    source.rename({"mlp_hidden_act": "hidden_act"})
    source.only(mamba_hidden_act="silu", sliding_window=None, mlp_bias=False, use_bias=False)
    source.only(mamba_proj_bias=False, use_conv_bias=True)
    kinds = mamba_kinds(source, "mamba", "attention", "mlp")
    if "mlp" not in kinds:
        raise ConfigError(f"{source.family}: layers_block_type must have a layer that is an mlp")
    usual = {"max_position_embeddings": 4096}
    config = Mamba2HybridConfig(
        **_decoder(source, kinds, ("layer_norm_epsilon", 1e-5), usual, False, "relu2"),
        num_mamba_heads=source.integer("mamba_num_heads", 128),
        mamba_head_dim=source.integer("mamba_head_dim", 64),
        state_size=source.integer("ssm_state_size", 128),
        num_groups=source.integer("n_groups", 8),
        conv_size=source.integer("conv_kernel", 4),
    )
    files = weights.take_all()
    prefix = "backbone" if "backbone.embeddings.weight" in files else "model"
    return config, nemotron_names(prefix).read(files, config, MTP)


def read_falcon_h1(source: ForeignConfig, weights: Weights) -> Read:
    """A folder of ``falcon_h1``, all of whose layers have both mixers."""
    source.only(attn_layer_indices=None, mamba_use_mlp=True, mlp_bias=False, projectors_bias=False)
    has_norm = source.boolean("mamba_rms_norm", False)
    if source.boolean("mamba_norm_before_gate", True) and has_norm:
        raise ConfigError(f"{source.family}: mamba_norm_before_gate is not supported")
    kinds = ["attention"] * source.num_layers("num_hidden_layers")
    usual = {"max_position_embeddings": 8192}
    sizes = _decoder(source, kinds, ("rms_norm_eps", 1e-5), usual)
    sizes |= {"mamba_layers": sizes["attention_layers"], **_mamba(source, sizes["hidden_size"])}
    config = Mamba2HybridConfig(
        **sizes,
        mixer_norm=has_norm,
        embedding_scale=source.scale("embedding_multiplier"),
    )
    return config, falcon_names(source, config).read(weights.take_all(), config, MTP)


def _granite(
    source: ForeignConfig, kinds: list[str], has_positions: bool = True, **usual: int
) -> dict[str, Any]:
    usual["max_position_embeddings"] = 2048
    return _decoder(source, kinds, ("rms_norm_eps", 1e-6), usual, has_positions) | {
        "embedding_scale": source.scale("embedding_multiplier"),
        "residual_scale": source.scale("residual_multiplier"),
        "attention_scale": source.scale("attention_multiplier"),
    }


def _decoder(
    source: ForeignConfig,
    kinds: list[str],
    eps: tuple[str, float],
    usual: Mapping[str, int],
    has_positions: bool = True,
    activation: str = "silu",
) -> dict[str, Any]:
    """What all folders say in the same way."""
    source.ignore(*HARMLESS)
    source.only(hidden_act=activation, attention_bias=False)
    refuse_limit(source, "time_step_limit")
    sizes = read_decoder(source, eps, {**usual, "num_hidden_layers": len(kinds)})
    layers = {f"{kind}_layers": layers_of(kinds, kind) for kind in ("attention", "mamba")}
    rotary = {"rope_theta": read_rotary(source, 1e4).theta}
    return sizes | layers | rotary | {"rotary_dim": sizes["head_dim"] if has_positions else 0}


def _mamba(source: ForeignConfig, width: int) -> dict[str, Any]:
    """The sizes of Mamba-2 where their names begin with it."""
    source.only(mamba_conv_bias=True, mamba_proj_bias=False)
    inner = source.integer("mamba_d_ssm", source.integer("mamba_expand", 2) * width)
    heads = source.divisor("mamba_n_heads", inner, 128)
    source.choice("mamba_d_head", "auto", inner // heads)
    return {
        "num_mamba_heads": heads,
        "mamba_head_dim": inner // heads,
        "state_size": source.integer("mamba_d_state", 256),
        "num_groups": source.integer("mamba_n_groups", 1),
        "conv_size": source.integer("mamba_d_conv", 4),
    }


#: Sizes of experts, of which there are none.
GGUF_HARMLESS = ("expert_used_count", "expert_shared_feed_forward_length")
#: What the converter says of the Mamba-2 that a Granite 4.0 without "H" does not have.
GGUF_NO_MAMBA = (
    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.inner_size"),
    "ssm.time_step_rank",
)


def read_gguf(file: GgufFile, name: str) -> Read:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    family = str(file.metadata["general.architecture"])
    source = GgufSource(file, name, family)
    source.refuse_experts("expert_count", source.anything("expert_count"))
    source.ignore(*GGUF_HARMLESS)
    # Nemotron-H's files may have but this one, as its configs do.
    eps = source.number("attention.layer_norm_epsilon", 1e-5)
    all_attention = family in ("granite", "falcon-h1")
    sizes = source.decoder(file, all_attention=all_attention, eps=eps)
    if family == "granite":
        source.ignore(*GGUF_NO_MAMBA)
    else:
        sizes |= _gguf_mamba(source)
    if family == "nemotron_h":
        names, sizes = gguf_names(), sizes | _gguf_nemotron(source, sizes)
    else:
        source.agree("rope.dimension_count", sizes["head_dim"])
        sizes["intermediate_size"] = source.integer("feed_forward_length")
        if family == "falcon-h1":
            names = gguf_names(mlp_norm="ffn_norm")
            sizes |= {"mamba_layers": sizes["attention_layers"], "rotary_dim": sizes["head_dim"]}
            sizes["mixer_norm"] = "blk.0.ssm_norm.weight" in file
        else:
            names = gguf_names(source.scale("logit_scale"))
            sizes |= _gguf_granite(source, sizes["head_dim"])
    config = Mamba2HybridConfig(**sizes)
    source.refuse_unknown()
    tensors = file if family == "falcon-h1" else PairedRows(file, config)
    return config, names.read(tensors, config, name=name)


def _gguf_mamba(source: GgufSource) -> dict[str, Any]:
    inner = source.integer("ssm.inner_size")
    heads = source.divisor("ssm.time_step_rank", inner)
    return {
        "num_mamba_heads": heads,
        "mamba_head_dim": inner // heads,
        "state_size": source.integer("ssm.state_size"),
        "num_groups": source.integer("ssm.group_count"),
        "conv_size": source.integer("ssm.conv_kernel"),
    }


def _gguf_granite(source: GgufSource, head_dim: int) -> dict[str, Any]:
    return {
        # So llama.cpp says whether there are positions.
        "rotary_dim": head_dim if source.boolean("rope.scaling.finetuned", True) else 0,
        "embedding_scale": source.scale("embedding_scale"),
        "residual_scale": source.scale("residual_scale"),
        "attention_scale": source.number("attention.scale", 0.0),
    }


def _gguf_nemotron(source: GgufSource, sizes: Mapping[str, Any]) -> dict[str, Any]:
    source.ignore("rope.dimension_count")  # there are no positions
    source.choice("rope.scaling.finetuned", False)
    num_layers, attention = sizes["num_hidden_layers"], set(sizes["attention_layers"])
    inners = source.per_layer("feed_forward_length", num_layers)
    inner = {size for size in inners if size}
    if len(inner) != 1 or any(inners[layer] for layer in attention):
        raise ConfigError(
            f"{source.family}: feed_forward_length must be one number in some layers that are not"
            " attention, and 0 in the others"
        )
    mamba = (layer for layer in range(num_layers) if not inners[layer] and layer not in attention)
    return {"mamba_layers": tuple(mamba), "intermediate_size": inner.pop()}
