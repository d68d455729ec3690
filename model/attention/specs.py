"""The mechanisms' specs: their options, and where their state and weights are written down."""

from __future__ import annotations

from model.attention import state_specs, weight_shapes
from model.attention.spec import AttentionConfig, Option, Options, Spec, key_dim, num_features
from model.files import ConfigError

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
    state_specs.linear_state,
    weight_shapes.heads_weights,
    {**PLAIN, **ROTARY, "rotary": Option("none", ("none", "before", "after")), **DENOMINATOR},
    rules=(check_rotary,),
)
COSINE = Spec(
    state_specs.taylor_state,
    weight_shapes.heads_weights,
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
    state_specs.exponential_state,
    weight_shapes.heads_weights,
    {**PLAIN, **ROTARY, "denominator": Option("feature", ("feature", "weights"))},
    rules=(check_rotary,),
)
RBF = Spec(
    state_specs.exponential_state,
    weight_shapes.projected_weights,
    {**PLAIN, **ROTARY, **PROJECTION},
    rules=(check_rotary,),
    buffers=fixed_projection,
)
PERFORMER = Spec(
    state_specs.exponential_state,
    weight_shapes.performer_weights,
    {**RBF.options, "map": Option("favor", ("favor", "simplified", "hyperbolic", "relu"))},
    rules=(check_rotary, check_pairs),
    buffers=fixed_projection,
)
SOFT_VQ = Spec(
    state_specs.soft_vq_state,
    weight_shapes.soft_vq_weights,
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
    state_specs.vq_state,
    weight_shapes.vq_weights,
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
    state_specs.cosformer_state,
    weight_shapes.heads_weights,
    {**PLAIN, "horizon": Option(4096, (2, 2**20))},
    rules=(check_horizon,),
)
DIJIANG = Spec(
    state_specs.decayed_state,
    weight_shapes.dijiang_weights,
    {**PARTS, "gate": Option(True), "published": Option(False)},
    rules=(check_published,),
    buffers=lambda options: ("frequency_draw",) if options["published"] else (),
)
RETNET = Spec(
    state_specs.decayed_state,
    weight_shapes.heads_weights,
    {
        **PARTS,
        "gate": Option(True),
        "positions": Option("xpos", ("xpos", "rotary", "none")),
        "key_dim": Option(0, WIDTH_OR_NONE),
    },
    rules=(check_rotary,),
)
WINDOW_LINEAR = Spec(
    state_specs.window_linear_state,
    weight_shapes.window_linear_weights,
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
    state_specs.normed_state,
    weight_shapes.normed_weights,
    {
        **PARTS,
        "map": Option("product", ("product", "elu", "relu", "identity")),
        "key_dim": Option(0, WIDTH_OR_NONE),
    },
)
GATED = Spec(
    state_specs.decayed_state,
    weight_shapes.gated_weights,
    {
        **CONVOLVED_GATED,
        "decay_rank": Option(16, WIDTH),
        "key_dim": Option(0, WIDTH_OR_NONE),
    },
)
DELTA = Spec(
    state_specs.decayed_state,
    weight_shapes.delta_weights,
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
    state_specs.softmax_state,
    weight_shapes.heads_weights,
    {**PLAIN, **ROTARY, "rotary": Option("before", ("none", "before"))},
    rules=(check_rotary,),
    constant_state=False,
)
