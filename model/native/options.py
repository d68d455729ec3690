"""The options of a model for the extension module: one function per family that it covers.

Sizes of matrices are not options: the module takes them from the weights that the config lists.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.architectures import ARCHITECTURES, load_class
from model.architectures.config import Config
from model.architectures.hybrid import SINKS, BoundedConfig
from model.attention import spec_of
from model.attention.specs import key_dim
from model.config import ModelConfig
from model.families.jamba.config import JambaConfig
from model.families.lfm2.config import Lfm2Config
from model.families.lfm3.config import Lfm3Config
from model.families.llama.config import FARS, LlamaConfig
from model.families.mamba.config import Mamba2Config, MambaConfig
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.families.qwen35.config import Qwen35Config
from model.families.rwkv7.config import Arwkv7Config, Rwkv7Config
from model.state import StateLayout

Options = dict[str, str | float]


#: Options' values without kernels, by mechanism and option.
WITHOUT_KERNELS: dict[tuple[str, str], tuple[str | int, ...]] = {
    ("elu", "denominator"): ("tokens",),
    ("relu", "denominator"): ("tokens",),
    ("softmax_map", "denominator"): ("tokens",),
    ("cosine", "denominator"): ("tokens",),
    ("cosine", "order"): (2,),
    ("efficient", "denominator"): ("weights",),
    ("performer", "map"): ("hyperbolic", "relu"),
    ("soft_vq", "qk_norm"): (True,),
    ("vq", "qk_norm"): (True,),
    ("window_linear", "older"): ("forgotten",),
    ("dijiang", "published"): (True,),
    ("delta", "channel_decay"): (True,),
}


def covers(config: Config) -> bool:
    """Whether there are kernels for the family of ``config``, of which some may not be built.

    Of our own blocks those for some options are missing, see `WITHOUT_KERNELS`.
    """
    for name, value in config.attention_options.items():
        if value in WITHOUT_KERNELS.get((config.attention, name), ()):
            return False
    return ARCHITECTURES[config.model_type].native is not None


def native_options(config: Config, layout: StateLayout) -> Options:
    """What the extension module knows of a model that is covered, by the names that it uses."""
    place = ARCHITECTURES[config.model_type].native
    assert place is not None, config.model_type
    options: Options = load_class(place)(config, layout)
    rounds_sums = config.state_dtype == "bfloat16"
    return {**options, "fixed_bytes": layout.fixed_bytes, "rounds_sums": rounds_sums}


def rwkv7_options(config: Rwkv7Config, layout: StateLayout) -> Options:
    """Of `model.families.rwkv7`."""
    return {
        "family": "rwkv7",
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "eps": config.norm_eps,
        "group_eps": config.group_norm_eps,
        "state_bytes": layout.num_bytes,
    }


def qwen35_options(config: Qwen35Config, layout: StateLayout) -> Options:
    """Of `model.families.qwen35`."""
    return {
        **_bounded_options(config, layout),
        "family": "qwen35",
        "conv_size": config.conv_size,
        "rotary_dim": config.rotary_dim,
        "num_key_heads": config.num_key_heads,
        "num_value_heads": config.num_value_heads,
        "key_head_dim": config.key_head_dim,
        "value_head_dim": config.value_head_dim,
    }


def lfm2_options(config: Lfm2Config, layout: StateLayout) -> Options:
    """Of `model.families.lfm2`."""
    return {
        **_bounded_options(config, layout),
        "family": "lfm2",
        "conv_size": config.conv_size,
        "rotary_dim": config.head_dim,
        "head_gates": False,
        "window": 0,
    }


def lfm3_options(config: Lfm3Config, layout: StateLayout) -> Options:
    """Of `model.families.lfm3`, which has LFM2's kernels."""
    windows, num_layers = config.window_layers, config.num_hidden_layers
    return {
        **lfm2_options(config, layout),
        **_rope_factors(config.rope_factors(config.rotary_dim)),
        **_rope_factors(config.rope_factors(config.window_rotary_dim), "window_"),
        "farthest": config.context or config.max_context,
        "head_gates": config.head_gates,
        "window": config.window if windows else 0,
        "window_rope_theta": config.window_rope_theta,
        **{f"window_{layer}": layer in windows for layer in range(num_layers)},
    }


def llama_options(config: LlamaConfig, layout: StateLayout) -> Options:
    """Of `model.families.llama`."""
    unrotated = config.unrotated_layers
    windows: Options = {}
    for i, plan in enumerate(config.windows):
        windows[f"context_{i}"] = plan.context
        windows[f"far_{i}"] = FARS.index(plan.far)
        windows[f"features_{i}"] = plan.features
    if windows:
        windows |= {"farthest": config.max_context, "slides": True}
    return {
        **_bounded_options(config, layout),
        **windows,
        "family": "llama",
        "windowed": bool(windows),
        "rotary_dim": config.head_dim,
        **_rope_factors(config.rope_factors),
        **{f"rotates_{i}": i not in unrotated for i in range(config.num_hidden_layers)},
    }


def _rope_factors(factors: Sequence[float], kind: str = "") -> Options:
    """Of the pairs of channels that turn; the names begin with ``kind``."""
    numbered = {f"{kind}rope_factor_{pair}": factor for pair, factor in enumerate(factors)}
    return {f"num_{kind}rope_factors": len(factors), **numbered}


def _bounded_options(config: BoundedConfig, layout: StateLayout) -> Options:
    """What families with attention over a bounded past share."""
    return {
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "num_rope_factors": 0,
        "context": config.context,
        "farthest": config.context,
        "sinks": SINKS,
        "slides": config.past == "slide",
        "group_bytes": layout.group_bytes,
        "eps": config.norm_eps,
        "state_bytes": layout.num_bytes,
    }


def mamba_options(config: MambaConfig, layout: StateLayout) -> Options:
    """Of `model.families.mamba`."""
    return {
        "family": "mamba",
        "num_layers": config.num_hidden_layers,
        **config.attention_options,
        "mixer_eps": config.mixer_norm_eps if config.mixer_norm else 0.0,
        "eps": config.norm_eps,
        "state_bytes": layout.num_bytes,
    }


def mamba2_options(config: Mamba2Config, layout: StateLayout) -> Options:
    """Of `model.families.mamba`."""
    return {
        "family": "mamba2",
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        **config.attention_options,
        "eps": config.norm_eps,
        "state_bytes": layout.num_bytes,
    }


def mamba2_hybrid_options(config: Mamba2HybridConfig, layout: StateLayout) -> Options:
    """Of `model.families.mamba2_hybrid`."""
    return {
        **_bounded_options(config, layout),
        "family": "mamba2_hybrid",
        "rotary_dim": config.rotary_dim,
        "intermediate_size": config.intermediate_size,
        "ends_with_mlp": config.ends_with_mlp,
        "num_mamba_heads": config.num_mamba_heads,
        "mamba_head_dim": config.mamba_head_dim,
        "state_size": config.state_size,
        "num_groups": config.num_groups,
        "conv_size": config.conv_size,
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "attention_scale": config.attention_scale,
    }


def jamba_options(config: JambaConfig, layout: StateLayout) -> Options:
    """Of `model.families.jamba`."""
    return {
        **mamba_options(config.mamba, layout),
        **_bounded_options(config, layout),
        "family": "jamba",
        "rotary_dim": 0,
    }


def arwkv7_options(config: Arwkv7Config, layout: StateLayout) -> Options:
    """Of `model.families.rwkv7`."""
    return {
        "family": "arwkv7",
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "eps": config.norm_eps,
        "group_eps": config.group_norm_eps,
        "state_bytes": layout.num_bytes,
    }


def block_options(config: ModelConfig, layout: StateLayout) -> Options:
    """Of `model.lm`."""
    spec = spec_of(config.attention)
    options = spec.values(config)
    state = spec.state_spec(config)
    sums = state["S"] if "S" in state else state["sum"]
    mechanism, feature_map = config.attention, "product"
    if mechanism == "performer" and options["map"] == "simplified":
        mechanism = "performer_simplified"
    elif "map" in options and mechanism == "normed":
        feature_map = options["map"]
    rotary = options.get("rotary", "none")
    if options.get("positions", "none") != "none":
        rotary = "before"
    return {
        "family": "block",
        "mechanism": mechanism,
        "rotary": rotary,
        "map": feature_map,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "key_dim": key_dim(config, options),
        "head_dim": config.head_dim,
        "num_features": sums.shape[1],
        "window": options.get("window", 0),
        "conv_size": options.get("conv_size", 0),
        "decay_rank": options.get("decay_rank", 0),
        "epoch": options.get("horizon", 2) // 2,
        "beta": options.get("beta", 1.0),
        "eps": config.rms_norm_eps,
        "rope_theta": options.get("rope_theta", 10_000.0),
        "gelu": config.mlp == "gelu",
        "max_beta": 2.0 if options.get("negative_eigenvalues") else 1.0,
        "xpos": options.get("positions") == "xpos",
        "state_bytes": layout.num_bytes,
    }
