"""The mechanisms without tensors: their options, their states and their weights' shapes.

A config is checked, a session's bytes are counted and a checkpoint's keys are compared with these
alone, so none of that imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from model.files import ConfigError
from model.tensor_spec import DType, Shape, TensorSpec

#: The options of a mechanism by name, defaults filled in.
Options = Mapping[str, Any]


class AttentionConfig(Protocol):
    """What a mechanism reads of a model's config."""

    @property
    def attention(self) -> str: ...
    @property
    def attention_options(self) -> Mapping[str, Any]: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


@dataclass(frozen=True)
class Option:
    """One option's default, and what it may be.

    ``allowed`` is for numbers the smallest and the largest value, for names
    the choice, and empty for booleans. ``refused`` has names that people will
    try, and why they are not built.
    """

    default: Any
    allowed: tuple[Any, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def check(self, name: str, value: Any) -> None:
        """Raises `ConfigError` where the option called ``name`` cannot be ``value``."""
        if type(value) is int and isinstance(self.default, float):
            value = float(value)
        if type(value) is not type(self.default):
            kind = type(self.default).__name__
            raise ConfigError(f"attention_options.{name} must be {kind}, not {value!r}")
        if isinstance(value, str):
            if value in self.refused:
                reason = self.refused[value]
                raise ConfigError(f"attention_options.{name} {value!r} is not built: {reason}")
            if value not in self.allowed:
                known = " or ".join(map(repr, self.allowed))
                raise ConfigError(f"attention_options.{name} must be {known}, not {value!r}")
        elif self.allowed and not self.allowed[0] <= value <= self.allowed[1]:
            low, high = self.allowed
            raise ConfigError(f"attention_options.{name} must be in {low}..{high}, not {value!r}")


def _no_buffers(options: Options) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Spec:
    """A mechanism as its config knows it.

    ``state`` and ``weights`` give one layer's tensors from the config and its
    options. ``buffers`` names those of ``weights`` that no gradient trains with
    the options that it is given, and ``rules`` are checks beyond one option's
    range: they raise `ConfigError`.
    ``constant_state`` is False only for the baseline whose cache grows.
    """

    state: Callable[[AttentionConfig, Options], dict[str, TensorSpec]]
    weights: Callable[[AttentionConfig, Options], dict[str, Shape]]
    options: Mapping[str, Option] = field(default_factory=dict)
    rules: tuple[Callable[[AttentionConfig, Options], None], ...] = ()
    buffers: Callable[[Options], tuple[str, ...]] = _no_buffers
    constant_state: bool = True

    def values(self, config: AttentionConfig) -> dict[str, Any]:
        """Every option of the mechanism: as the config has it, else its default."""
        defaults = {name: option.default for name, option in self.options.items()}
        return {**defaults, **config.attention_options}

    def check(self, config: AttentionConfig) -> None:
        """Raises `ConfigError` that names the option where one is unknown or out of range."""
        for name, value in config.attention_options.items():
            if name not in self.options:
                raise ConfigError(
                    f"attention_options.{name} is unknown to {config.attention!r}"
                    f" (it has: {', '.join(sorted(self.options)) or 'none'})"
                )
            self.options[name].check(name, value)
        if self.values(config).get("conv_size") == 1:
            raise ConfigError("attention_options.conv_size must be 0 or at least 2, not 1")
        for rule in self.rules:
            rule(config, self.values(config))

    def state_spec(self, config: AttentionConfig) -> dict[str, TensorSpec]:
        """The tensors of one layer's state, known before any token is seen.

        With a convolution over W tokens, conv [W - 1, H (2 K + V)] is one of them.
        """
        options = self.values(config)
        spec = self.state(config, options)
        if options.get("conv_size"):
            spec["conv"] = TensorSpec((options["conv_size"] - 1, qkv_rows(config, options)))
        return spec

    def weight_shapes(self, config: AttentionConfig) -> dict[str, Shape]:
        """The names and shapes of one layer's weights, as a checkpoint holds them."""
        return self.weights(config, self.values(config))

    def fixed_weights(self, config: AttentionConfig) -> tuple[str, ...]:
        """The names of those weights of one layer that no gradient trains."""
        return self.buffers(self.values(config))


def key_dim(config: AttentionConfig, options: Options) -> int:
    """K: option ``key_dim``, where there is one and it is not zero."""
    chosen: int = options.get("key_dim", 0)
    return chosen or config.head_dim


def num_features(config: AttentionConfig, options: Options) -> int:
    """F: option ``features``, where there is one and it is not zero."""
    chosen: int = options.get("features", 0)
    return chosen or config.head_dim


def qkv_rows(config: AttentionConfig, options: Options) -> int:
    """Rows of the one matrix that gives q, k and v."""
    return config.num_attention_heads * (2 * key_dim(config, options) + config.head_dim)


# -------------------------------------------------------------------------------------------------
# The state of one layer of each mechanism, by the formulas of their own files.
#
# H heads, K key features and V = ``head_dim`` value features per head, F features
# of a map. The state of a convolution is added by `model.attention.specs.Spec`.


State = dict[str, TensorSpec]


def _sums(config: AttentionConfig, features: int, dtype: DType = "float32") -> State:
    return {"S": _matrix(config, features, dtype)}


def _per_head(config: AttentionConfig, *shape: int, dtype: DType = "float32") -> TensorSpec:
    return TensorSpec((config.num_attention_heads, *shape), dtype)


def _matrix(config: AttentionConfig, features: int, dtype: DType = "float32") -> TensorSpec:
    """A sum of products of features and values, [H, F, V]."""
    shape = config.num_attention_heads, features, config.head_dim
    return TensorSpec(shape, dtype, is_sum=True)


def linear_state(config: AttentionConfig, options: Options) -> State:
    """S [H, K, V] and, for a sum of the weights, z [H, K]; float64 because nothing decays."""
    state = _linear_state(config, num_features(config, options))
    if options["denominator"] == "tokens":
        del state["z"]
    return state


def taylor_state(config: AttentionConfig, options: Options) -> State:
    """As `linear_state` with one feature more, and those of each two channels for order 2."""
    dim = key_dim(config, options)
    pairs = dim * (dim + 1) // 2 if options["order"] == 2 else 0
    return linear_state(config, {**options, "features": 1 + dim + pairs})


def _linear_state(config: AttentionConfig, features: int) -> State:
    z = _per_head(config, features, dtype="float64")
    return {**_sums(config, features, "float64"), "z": z}


def exponential_state(config: AttentionConfig, options: Options) -> State:
    """Exponential features: S [H, F, V] and z [H, F] relative to max [H, F]."""
    features = num_features(config, options)
    return {**_linear_state(config, features), "max": _per_head(config, features)}


def soft_vq_state(config: AttentionConfig, options: Options) -> State:
    """As `exponential_state`, one feature per codeword."""
    return exponential_state(config, {"features": options["codewords"]})


def window_linear_state(config: AttentionConfig, options: Options) -> State:
    """A window of keys and values [W, H, K], and `exponential_state` of older ones if kept."""
    ring = TensorSpec((options["window"], config.num_attention_heads, config.head_dim))
    older = exponential_state(config, options) if options["older"] == "linear" else {}
    return {"k": ring, "v": ring, **older}


def vq_state(config: AttentionConfig, options: Options) -> State:
    """Codes and values of the window; counts and sums per codeword of what left it."""
    heads, dim, num_codes = config.num_attention_heads, config.head_dim, options["codewords"]
    return {
        "code": TensorSpec((options["window"], heads), "int64"),
        "v": TensorSpec((options["window"], heads, dim)),
        "count": _per_head(config, num_codes, dtype="int64"),
        "sum": _matrix(config, num_codes, "float64"),
    }


def cosformer_state(config: AttentionConfig, options: Options) -> State:
    """S [H, 2K, V] and z [H, 2K] of this epoch and of the one before it."""
    s = _matrix(config, 2 * config.head_dim)
    z = _per_head(config, 2 * config.head_dim)
    return {"S": s, "z": z, "S_before": s, "z_before": z}


def decayed_state(config: AttentionConfig, options: Options) -> State:
    """S [H, K, V]."""
    return _sums(config, key_dim(config, options))


def normed_state(config: AttentionConfig, options: Options) -> State:
    """S [H, K, V], float64 because nothing decays."""
    return _sums(config, key_dim(config, options), "float64")


def softmax_state(config: AttentionConfig, options: Options) -> State:
    """The cache of an empty text."""
    empty = _per_head(config, 0, config.head_dim)
    return {"k": empty, "v": empty}


# -------------------------------------------------------------------------------------------------
# The weights of one layer of each mechanism, by name, as a checkpoint holds them.
#
# H heads, K key features and V = ``head_dim`` value features per head, F features
# of a map, D model width.


Weights = dict[str, Shape]


def heads_weights(config: AttentionConfig, options: Options) -> Weights:
    """``qkv`` [H (2 K + V), D] and ``out`` [D, H V], and what the options of all add."""
    rows, width = qkv_rows(config, options), config.num_attention_heads * config.head_dim
    shapes: Weights = {
        "qkv.weight": (rows, config.hidden_size),
        "out.weight": (config.hidden_size, width),
    }
    if config.attention_bias:
        shapes |= {"qkv.bias": (rows,), "out.bias": (config.hidden_size,)}
    if options["conv_size"]:
        shapes["conv_weight"] = (rows, options["conv_size"])
    if options["gate"]:
        shapes["gate.weight"] = (width, config.hidden_size)
    if options.get("norm", True):
        shapes["norm_weight"] = (config.head_dim,)
    return shapes


def gated_weights(config: AttentionConfig, options: Options) -> Weights:
    """A decay of low rank per channel."""
    keys = config.num_attention_heads * key_dim(config, options)
    return {
        **heads_weights(config, options),
        "decay_down.weight": (options["decay_rank"], config.hidden_size),
        "decay_up.weight": (keys, options["decay_rank"]),
        "decay_up.bias": (keys,),
    }


def delta_weights(config: AttentionConfig, options: Options) -> Weights:
    """A gate beta per head and, where there is one, a decay per head or per channel."""
    heads, keys = config.num_attention_heads, key_dim(config, options)
    shapes = heads_weights(config, options)
    shapes["beta.weight"] = (heads, config.hidden_size)
    if options["channel_decay"]:
        shapes |= {
            "decay_down.weight": (keys, config.hidden_size),
            "decay_up.weight": (heads * keys, keys),
            "decay_up.bias": (heads * keys,),
        }
    elif options["decay"]:
        shapes |= {"decay.weight": (heads, config.hidden_size), "decay.bias": (heads,)}
    if options["decay"]:
        shapes["decay_log"] = (heads,)
    return shapes


def dijiang_weights(config: AttentionConfig, options: Options) -> Weights:
    """A weight per frequency, learned for each head or drawn once for all."""
    dim = config.head_dim
    weights: Weights = {"frequency_weight": (config.num_attention_heads, dim)}
    if options["published"]:
        weights = {"frequency_draw": (dim,)}
    return {**heads_weights(config, options), **weights}


def normed_weights(config: AttentionConfig, options: Options) -> Weights:
    """The affine maps of map "product"."""
    shapes, keys = heads_weights(config, options), key_dim(config, options)
    if options["map"] == "product":
        for name in ("q_map", "k_map"):
            shapes[f"{name}.both.weight"] = (2 * keys, keys)
            shapes[f"{name}.both.bias"] = (2 * keys,)
    return shapes


def projected_weights(config: AttentionConfig, options: Options) -> Weights:
    """A projection [H, F, K] of random features."""
    shape = (config.num_attention_heads, num_features(config, options), config.head_dim)
    return {**heads_weights(config, options), "projection": shape}


def performer_weights(config: AttentionConfig, options: Options) -> Weights:
    """As `projected_weights`; a row gives two features where both its signs are taken."""
    features = num_features(config, options)
    rows = features // 2 if options["map"] == "hyperbolic" else features
    return projected_weights(config, {**options, "features": rows})


def window_linear_weights(config: AttentionConfig, options: Options) -> Weights:
    """As `projected_weights`, where something is kept of older tokens."""
    kept = options["older"] == "linear"
    return (projected_weights if kept else heads_weights)(config, options)


def soft_vq_weights(config: AttentionConfig, options: Options) -> Weights:
    """A codebook [H, C, K] and its priors [H, C]."""
    heads, num_codes = config.num_attention_heads, options["codewords"]
    return {
        **heads_weights(config, options),
        "codebook": (heads, num_codes, config.head_dim),
        "log_prior": (heads, num_codes),
    }


def vq_weights(config: AttentionConfig, options: Options) -> Weights:
    """A codebook [H, C, K], how much each codeword is used, and a bias per distance."""
    heads, num_codes = config.num_attention_heads, options["codewords"]
    return {
        **heads_weights(config, options),
        "codebook": (heads, num_codes, config.head_dim),
        "ema_count": (heads, num_codes),
        "bias": (heads, options["window"]),
    }


# -------------------------------------------------------------------------------------------------
# The mechanisms' specs: their options, and where their state and weights are written down.


WIDTH = (1, 65536)
#: 0 leaves the choice to the model's own width.
WIDTH_OR_NONE = (0, 65536)

#: Of every mechanism: a convolution over q, k and v, a gate of the output, a norm of each head.
PARTS = {"conv_size": Option(0, (0, 1024)), "gate": Option(False)}
PLAIN = {**PARTS, "norm": Option(False)}
CONVOLVED_GATED = {"conv_size": Option(4, (0, 1024)), "gate": Option(True)}
ROTARY = {
    "rotary": Option("none", ("none", "before")),
    "rope_theta": Option(10_000.0, (2.0, 1e12)),
}


DENOMINATOR = {"denominator": Option("weights", ("weights", "tokens"))}
#: Why Performer's features are not redrawn in training, as its authors do.
REDRAWN = (
    "training carries the state from window to window, and sums over features of one draw mean"
    " nothing to those of another; 'trained' moves W a little with each step"
)
PROJECTION = {
    "features": Option(0, WIDTH_OR_NONE),
    "orthogonal": Option(True),
    "projection": Option("fixed", ("fixed", "trained"), {"redrawn": REDRAWN}),
}


def fixed_projection(options: Options) -> tuple[str, ...]:
    """Random features, unless they are trained."""
    return () if options["projection"] == "trained" else ("projection",)


def check_rotary(config: AttentionConfig, options: Options) -> None:
    """Refuses q and k that cannot be rotated in pairs of channels."""
    dim = key_dim(config, options)
    if dim % 2 and options.get("rotary", options.get("positions")) != "none":
        name = "attention_options.key_dim" if dim != config.head_dim else "head_dim"
        raise ConfigError(f"{name} must be even for rotary positions, not {dim}")


def check_published(config: AttentionConfig, options: Options) -> None:
    """Refuses a published DiJiang whose q and k cannot be rotated in pairs of channels."""
    if options["published"] and config.head_dim % 2:
        raise ConfigError(f"head_dim must be even for rotary positions, not {config.head_dim}")


def check_pairs(config: AttentionConfig, options: Options) -> None:
    """Refuses an odd number of features where each has one of the other sign."""
    features = num_features(config, options)
    if options["map"] == "hyperbolic" and features % 2:
        name = "attention_options.features" if options["features"] else "head_dim"
        raise ConfigError(f"{name} must be even for map 'hyperbolic', not {features}")


def check_order(config: AttentionConfig, options: Options) -> None:
    """Refuses weights below zero, and narrow keys where they would save nothing."""
    if options["order"] == 2:
        return
    if not options["unit_length"]:
        raise ConfigError("attention_options.unit_length must be true for order 1")
    if options["key_dim"]:
        raise ConfigError("attention_options.key_dim must be 0 for order 1")


def check_older(config: AttentionConfig, options: Options) -> None:
    """Refuses features of tokens that are forgotten."""
    if options["features"] and options["older"] == "forgotten":
        raise ConfigError("attention_options.features must be 0 for older 'forgotten'")


def check_channel_decay(config: AttentionConfig, options: Options) -> None:
    """Refuses a kind of decay where there is none."""
    if options["channel_decay"] and not options["decay"]:
        raise ConfigError("attention_options.channel_decay must be false without a decay")


def check_horizon(config: AttentionConfig, options: Options) -> None:
    """Refuses a horizon that has no half."""
    if options["horizon"] % 2:
        raise ConfigError(f"attention_options.horizon must be even, not {options['horizon']}")


LINEAR = Spec(
    linear_state,
    heads_weights,
    {**PLAIN, **ROTARY, "rotary": Option("none", ("none", "before", "after")), **DENOMINATOR},
    rules=(check_rotary,),
)
COSINE = Spec(
    taylor_state,
    heads_weights,
    {
        **PLAIN,
        **ROTARY,
        **DENOMINATOR,
        "order": Option(1, (1, 2)),
        "unit_length": Option(True),
        "key_dim": Option(0, (0, 256)),
    },
    rules=(check_order, check_rotary),
)
EFFICIENT = Spec(
    exponential_state,
    heads_weights,
    {**PLAIN, **ROTARY, "denominator": Option("feature", ("feature", "weights"))},
    rules=(check_rotary,),
)
RBF = Spec(
    exponential_state,
    projected_weights,
    {**PLAIN, **ROTARY, **PROJECTION},
    rules=(check_rotary,),
    buffers=fixed_projection,
)
PERFORMER = Spec(
    exponential_state,
    performer_weights,
    {**RBF.options, "map": Option("favor", ("favor", "simplified", "hyperbolic", "relu"))},
    rules=(check_rotary, check_pairs),
    buffers=fixed_projection,
)
SOFT_VQ = Spec(
    soft_vq_state,
    soft_vq_weights,
    {
        **PLAIN,
        **ROTARY,
        "codewords": Option(64, WIDTH),
        "beta": Option(1.0, (0.0, 1e9)),
        "qk_norm": Option(False),
    },
    rules=(check_rotary,),
)
VQ = Spec(
    vq_state,
    vq_weights,
    {
        **PLAIN,
        "codewords": Option(64, WIDTH),
        "window": Option(64, WIDTH),
        "commitment": Option(0.02, (0.0, 1e9)),
        "qk_norm": Option(False),
    },
    buffers=lambda options: ("codebook", "ema_count"),
)
COSFORMER = Spec(
    cosformer_state,
    heads_weights,
    {**PLAIN, "horizon": Option(4096, (2, 2**20))},
    rules=(check_horizon,),
)
DIJIANG = Spec(
    decayed_state,
    dijiang_weights,
    {**PARTS, "gate": Option(True), "published": Option(False)},
    rules=(check_published,),
    buffers=lambda options: ("frequency_draw",) if options["published"] else (),
)
RETNET = Spec(
    decayed_state,
    heads_weights,
    {
        **PARTS,
        "gate": Option(True),
        "positions": Option("xpos", ("xpos", "rotary", "none")),
        "key_dim": Option(0, WIDTH_OR_NONE),
    },
    rules=(check_rotary,),
)
WINDOW_LINEAR = Spec(
    window_linear_state,
    window_linear_weights,
    {
        **PLAIN,
        **ROTARY,
        "rotary": Option("before", ("none", "before")),
        "window": Option(64, WIDTH),
        "features": Option(0, WIDTH_OR_NONE),
        "older": Option("linear", ("linear", "forgotten")),
    },
    rules=(check_rotary, check_older),
)
NORMED = Spec(
    normed_state,
    normed_weights,
    {
        **PARTS,
        "map": Option("product", ("product", "elu", "relu", "identity")),
        "key_dim": Option(0, WIDTH_OR_NONE),
    },
)
GATED = Spec(
    decayed_state,
    gated_weights,
    {
        **CONVOLVED_GATED,
        "decay_rank": Option(16, WIDTH),
        "key_dim": Option(0, WIDTH_OR_NONE),
    },
)
DELTA = Spec(
    decayed_state,
    delta_weights,
    {
        **CONVOLVED_GATED,
        "decay": Option(True),
        "key_dim": Option(0, WIDTH_OR_NONE),
        "negative_eigenvalues": Option(False),
        "channel_decay": Option(False),
    },
    rules=(check_channel_decay,),
)
SOFTMAX = Spec(
    softmax_state,
    heads_weights,
    {**PLAIN, **ROTARY, "rotary": Option("before", ("none", "before"))},
    rules=(check_rotary,),
    constant_state=False,
)
