"""Granite, Nemotron-H and Falcon-H1, dense, in folders and in GGUF, and their keys.

A Granite is a 4.0-H, or has attention alone, as 3.x have and the other 4.0. Folders are of Hugging
Face's layouts, GGUF as llama.cpp's converter writes it: of the first two the rows of q and k lie in
pairs, also where a model has no positions. Falcon-H1's multipliers are those of the weights
already.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from model.architectures.hybrid import BoundedConfig
from model.families.mamba.read import GGUF, MambaNames, folder_names, refuse_limit
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.files import ConfigError
from model.foreign.config import ForeignConfig, read_rotary
from model.foreign.gguf import GgufSource, PairedRows
from model.foreign.hybrid_names import HybridNames, refuse_other_head, weight
from model.foreign.weights import Part, Renamed, Weights
from model.weights import Array, file_name
from model.weights.gguf_file import GgufFile

_MIXER = "mixer."


def _of_mixer(names: MambaNames, prefix: str) -> dict[str, Part]:
    """Those of a mixer, whose keys have ``prefix`` in front, with neither."""
    return {
        ours.removeprefix(_MIXER): replace(part, keys=(part.keys[0].removeprefix(prefix),))
        for ours, part in names.inside.items()
        if ours.startswith(_MIXER)
    }


#: Of Mamba, the first or the second, in folders and in GGUF, and of attention.
FOLDER_MAMBA = _of_mixer(folder_names(()), _MIXER)
GGUF_MAMBA = _of_mixer(GGUF, "")
FOLDER_ATTENTION = {f"{ours}.weight": weight(f"{ours}_proj") for ours in "qkv"}
FOLDER_ATTENTION["out.weight"] = weight("o_proj")


@dataclass(frozen=True)
class Mamba2HybridNames(HybridNames):
    """``other`` is a Mamba-2, ``mlp`` a layer that is an MLP alone."""

    mlp: Mapping[str, Part] = field(default_factory=dict)

    def mixers(self, config: BoundedConfig) -> list[Mapping[str, Part]]:
        """See `HybridNames`; those of two mixers have theirs in front."""
        assert isinstance(config, Mamba2HybridConfig), config
        both = {f"attention.{ours}": part for ours, part in self.attention.items()}
        both |= {f"mamba.{ours}": part for ours, part in self.other.items()}
        kinds = {(True, True): both, (True, False): self.attention}
        kinds |= {(False, True): self.other, (False, False): self.mlp}
        pairs = zip(config.is_attention, config.is_mamba, strict=True)
        return [kinds[pair] for pair in pairs]


@dataclass(frozen=True)
class Multipliers:
    """Of Falcon-H1: what inputs and outputs of its linear maps are multiplied with.

    ``ssm`` are those of z, x, B, C and dt, ``mlp`` of the gate and of what leaves the MLP.
    """

    head: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    ssm: tuple[float, ...] = (1.0,) * 5
    mlp: tuple[float, ...] = (1.0,) * 2


def inside(prefix: str, parts: Mapping[str, Part]) -> dict[str, Part]:
    """``parts`` whose keys begin with ``prefix``."""
    return {ours: replace(part, keys=(f"{prefix}.{part.keys[0]}",)) for ours, part in parts.items()}


#: The MLP of Granite, in folders: of hybrids with two matrices in one, and of the others.
STACKED_MLP = {
    "mlp.gate.weight": weight("shared_mlp.input_linear", "first_half"),
    "mlp.up.weight": weight("shared_mlp.input_linear", "second_half"),
    "mlp.down.weight": weight("shared_mlp.output_linear"),
}
SEPARATE_MLP = {f"mlp.{n}.weight": weight(f"mlp.{n}_proj") for n in ("gate", "up", "down")}


def granite_names(logits_scaling: float, mlp: Mapping[str, Part]) -> Mamba2HybridNames:
    """Those of Granite, whose logits are divided by ``logits_scaling``: here the norm before."""
    return Mamba2HybridNames(
        ends={
            "embedding.weight": weight("model.embed_tokens"),
            "norm.weight": Part(("model.norm.weight",), factor=1.0 / logits_scaling),
            "head.weight": weight("lm_head"),
        },
        block="model.layers.{}",
        both={
            "mixer_norm.weight": weight("input_layernorm"),
            "mlp_norm.weight": weight("post_attention_layernorm"),
            **mlp,
        },
        attention=inside("self_attn", FOLDER_ATTENTION),
        other=inside("mamba", FOLDER_MAMBA),
    )


def nemotron_names(prefix: str) -> Mamba2HybridNames:
    """Those of Nemotron-H; all but the head begin with ``prefix``."""
    return Mamba2HybridNames(
        ends={
            "embedding.weight": weight(f"{prefix}.embeddings"),
            "norm.weight": weight(f"{prefix}.norm_f"),
            "head.weight": weight("lm_head"),
        },
        block=f"{prefix}.layers.{{}}",
        both={"mixer_norm.weight": weight("norm")},
        attention=inside("mixer", FOLDER_ATTENTION),
        other=inside("mixer", FOLDER_MAMBA),
        mlp={f"{name}.weight": weight(f"mixer.{name}_proj") for name in ("up", "down")},
    )


def falcon_names(config: Mamba2HybridConfig, by: Multipliers) -> Mamba2HybridNames:
    """Those of Falcon-H1, whose multipliers are those of the weights here."""
    mamba = config.mamba
    writes = mamba.num_groups * mamba.state_size
    rows = (mamba.inner_size, mamba.inner_size, writes, writes, mamba.num_attention_heads)
    of_rows = [by.ssm_in * each for each, num in zip(by.ssm, rows, strict=True) for _ in range(num)]
    factors: dict[str, float | tuple[float, ...]] = {
        "q.weight": by.attention_in,
        "k.weight": by.attention_in * by.key,
        "v.weight": by.attention_in,
        "out.weight": by.attention_out,
    }
    attention = {ours: replace(p, factor=factors[ours]) for ours, p in FOLDER_ATTENTION.items()}
    in_weight, out_weight = FOLDER_MAMBA["in.weight"], FOLDER_MAMBA["out.weight"]
    other = FOLDER_MAMBA | {
        "in.weight": replace(in_weight, factor=tuple(of_rows)),
        "out.weight": replace(out_weight, factor=by.ssm_out),
    }
    gate, down = by.mlp
    return Mamba2HybridNames(
        ends={
            "embedding.weight": weight("model.embed_tokens"),
            "norm.weight": Part(("model.final_layernorm.weight",), factor=by.head),
            "head.weight": weight("lm_head"),
        },
        block="model.layers.{}",
        both={
            "mixer_norm.weight": weight("input_layernorm"),
            "mlp_norm.weight": weight("pre_ff_layernorm"),
            "mlp.gate.weight": Part(("feed_forward.gate_proj.weight",), factor=gate),
            "mlp.up.weight": weight("feed_forward.up_proj"),
            "mlp.down.weight": Part(("feed_forward.down_proj.weight",), factor=down),
        },
        attention=inside("self_attn", attention),
        other=inside("mamba", other),
    )


def gguf_names(logits_scaling: float = 1.0, mlp_norm: str = "ffn_norm.weight") -> Mamba2HybridNames:
    """Those of GGUF, where Falcon-H1 has another name for one norm."""
    return Mamba2HybridNames(
        ends={
            "embedding.weight": weight("token_embd"),
            "norm.weight": Part(("output_norm.weight",), factor=1.0 / logits_scaling),
            "head.weight": weight("output"),
        },
        block="blk.{}",
        both={
            "mixer_norm.weight": weight("attn_norm"),
            "mlp_norm.weight": Part((mlp_norm,)),
            **{f"mlp.{name}.weight": weight(f"ffn_{name}") for name in ("gate", "up", "down")},
        },
        attention={
            **{f"{name}.weight": weight(f"attn_{name}") for name in "qkv"},
            "out.weight": weight("attn_output"),
        },
        other=GGUF_MAMBA,
        mlp={f"{name}.weight": weight(f"ffn_{name}") for name in ("up", "down")},
    )


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
    """A folder of ``granite``, whose layers are all attention."""
    files, names = weights.take_all(), granite_names(source.scale("logits_scaling"), SEPARATE_MLP)
    return _read(files, _granite(source), names)


def read_granite_hybrid(source: ForeignConfig, weights: Weights) -> Read:
    """A folder of ``granitemoehybrid`` without experts."""
    files, names = weights.take_all(), granite_names(source.scale("logits_scaling"), STACKED_MLP)
    return _read(files, _granite_hybrid(source), names)


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
    mlps = [STACKED_MLP] if any(config.is_mamba) else [SEPARATE_MLP, STACKED_MLP]
    layouts = [granite_names(1.0, mlp).parts_of(config) for mlp in mlps]
    for parts in layouts:
        del parts["norm.weight"]
    return layouts


def _read(files: Mapping[str, Array], config: Mamba2HybridConfig, names: Mamba2HybridNames) -> Read:
    file = file_name(files)
    unused = {key for key in files if key.startswith("mtp.")}
    unused |= refuse_other_head(files, config, names, file)
    ours = Renamed(files, names.parts_of(config))
    ours.check(file, config.weight_shapes(), unused)
    return config, ours


def _granite(source: ForeignConfig) -> Mamba2HybridConfig:
    source.choice("mlp_bias", False)
    kinds = ["attention"] * source.num_layers("num_hidden_layers")
    return Mamba2HybridConfig(
        **_shared(source, kinds, True),
        **_granite_scales(source),
        intermediate_size=source.integer("intermediate_size"),
    )


def _granite_hybrid(source: ForeignConfig) -> Mamba2HybridConfig:
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
        **_granite_scales(source),
        intermediate_size=source.integer("shared_intermediate_size", 1024),
    )


def _granite_scales(source: ForeignConfig) -> dict[str, Any]:
    return {
        "embedding_scale": source.scale("embedding_multiplier"),
        "residual_scale": source.scale("residual_multiplier"),
        "attention_scale": source.scale("attention_multiplier"),
        "norm_eps": source.number("rms_norm_eps", 1e-6),
        "max_context": source.integer("max_position_embeddings", 2048),
    }


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


#: Sizes of experts, of which there are none.
GGUF_HARMLESS = ("expert_used_count", "expert_shared_feed_forward_length")
#: The architectures whose layers all have attention.
ALL_ATTENTION = ("granite", "falcon-h1")
#: What the converter says of the Mamba-2 that a Granite 4.0 without "H" does not have.
GGUF_NO_MAMBA = tuple(
    f"ssm.{name}"
    for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)


def read_gguf(file: GgufFile, name: str) -> tuple[Mamba2HybridConfig, Renamed]:
    """The model in a file called ``name``.

    Raises `ConfigError` or `CheckpointError`, which name the key.
    """
    family = str(file.metadata["general.architecture"])
    source = GgufSource(file, name, family)
    names = gguf_names()
    shared = _gguf_shared(source, file, family in ALL_ATTENTION)
    if family == "granite":
        source.ignore(*GGUF_NO_MAMBA)
    else:
        shared |= _gguf_mamba(source)
    if family in ("granite", "granitehybrid"):
        config = _gguf_granite(source, shared)
        names = gguf_names(source.scale("logit_scale"))
    elif family == "nemotron_h":
        config = _gguf_nemotron(source, shared)
    else:
        config = _gguf_falcon_h1(source, shared, file)
        names = gguf_names(mlp_norm="ffn_norm")
    source.refuse_unknown()
    tensors = file if family == "falcon-h1" else PairedRows(file, config)
    weights = Renamed(tensors, names.parts_of(config))
    weights.check(name, config.weight_shapes(), set())
    return config, weights


def _gguf_shared(source: GgufSource, file: GgufFile, all_attention: bool) -> dict[str, Any]:
    """What all say in the same way."""
    if source.anything("expert_count"):
        raise ConfigError(f"{source.family}: expert_count is not supported: {DENSE_ALONE}")
    source.ignore(*GGUF_HARMLESS)
    # Nemotron-H's files may have but the second, as its configs do.
    eps = source.number("attention.layer_norm_epsilon", 1e-5)
    eps = source.number("attention.layer_norm_rms_epsilon", eps)
    theta = source.number("rope.freq_base", 1e4)
    sizes = source.decoder(file, all_attention=all_attention)
    return sizes | {"rope_theta": theta, "norm_eps": eps}


def _gguf_mamba(source: GgufSource) -> dict[str, Any]:
    inner, heads = source.integer("ssm.inner_size"), source.integer("ssm.time_step_rank")
    if inner % heads:
        raise ConfigError(f"{source.family}: ssm.time_step_rank must divide {inner}, not {heads}")
    return {
        "num_mamba_heads": heads,
        "mamba_head_dim": inner // heads,
        "state_size": source.integer("ssm.state_size"),
        "num_groups": source.integer("ssm.group_count"),
        "conv_size": source.integer("ssm.conv_kernel"),
    }


def _gguf_granite(source: GgufSource, shared: dict[str, Any]) -> Mamba2HybridConfig:
    head_dim = shared["head_dim"]
    source.agree("rope.dimension_count", head_dim)
    return Mamba2HybridConfig(
        **shared,
        intermediate_size=source.integer("feed_forward_length"),
        # So llama.cpp says whether there are positions.
        rotary_dim=head_dim if source.boolean("rope.scaling.finetuned", True) else 0,
        embedding_scale=source.scale("embedding_scale"),
        residual_scale=source.scale("residual_scale"),
        attention_scale=source.number("attention.scale", 0.0),
    )


def _gguf_nemotron(source: GgufSource, shared: dict[str, Any]) -> Mamba2HybridConfig:
    source.ignore("rope.dimension_count")  # there are no positions
    source.choice("rope.scaling.finetuned", False)
    num_layers, attention = shared["num_hidden_layers"], set(shared["attention_layers"])
    sizes = source.per_layer("feed_forward_length", num_layers)
    inner = {size for size in sizes if size}
    if len(inner) != 1 or any(sizes[layer] for layer in attention):
        raise ConfigError(
            f"{source.family}: feed_forward_length must be one number in some layers that are not"
            " attention, and 0 in the others"
        )
    mamba = (layer for layer in range(num_layers) if not sizes[layer] and layer not in attention)
    return Mamba2HybridConfig(**shared, mamba_layers=tuple(mamba), intermediate_size=inner.pop())


def _gguf_falcon_h1(
    source: GgufSource, shared: dict[str, Any], file: GgufFile
) -> Mamba2HybridConfig:
    head_dim = shared["head_dim"]
    source.agree("rope.dimension_count", head_dim)
    return Mamba2HybridConfig(
        **shared,
        mamba_layers=shared["attention_layers"],
        intermediate_size=source.integer("feed_forward_length"),
        rotary_dim=head_dim,
        mixer_norm="blk.0.ssm_norm.weight" in file,
    )
