"""The mechanisms' specs: their options, and where their state and weights are written down."""

from __future__ import annotations

from model.attention import state_specs, weight_shapes
from model.attention.spec import AttentionConfig, Option, Options, Spec, key_dim
from model.files import ConfigError

WIDTH = (1, 65536)
#: 0 leaves the choice to the model's own width.
WIDTH_OR_NONE = (0, 65536)

ROTARY = {
    "rotary": Option("none", ("none", "before")),
    "rope_theta": Option(10_000.0, (2.0, 1e12)),
}


def check_rotary(config: AttentionConfig, options: Options) -> None:
    """Refuses q and k that cannot be rotated in pairs of channels."""
    dim = key_dim(config, options)
    if dim % 2 and options.get("rotary", options.get("positions")) != "none":
        name = "attention_options.key_dim" if dim != config.head_dim else "head_dim"
        raise ConfigError(f"{name} must be even for rotary positions, not {dim}")


def check_horizon(config: AttentionConfig, options: Options) -> None:
    """Refuses a horizon that has no half."""
    if options["horizon"] % 2:
        raise ConfigError(f"attention_options.horizon must be even, not {options['horizon']}")


def check_convolution(config: AttentionConfig, options: Options) -> None:
    """Refuses a convolution over one token."""
    if options["conv_size"] == 1:
        raise ConfigError("attention_options.conv_size must be 0 or at least 2, not 1")


LINEAR = Spec(
    state_specs.linear_state,
    weight_shapes.heads_weights,
    {**ROTARY, "rotary": Option("none", ("none", "before", "after"))},
    rules=(check_rotary,),
)
COSINE = Spec(state_specs.cosine_state, weight_shapes.heads_weights, ROTARY, rules=(check_rotary,))
EFFICIENT = Spec(
    state_specs.exponential_state, weight_shapes.heads_weights, ROTARY, rules=(check_rotary,)
)
RBF = Spec(
    state_specs.exponential_state,
    weight_shapes.projected_weights,
    {**ROTARY, "features": Option(0, WIDTH_OR_NONE), "orthogonal": Option(True)},
    rules=(check_rotary,),
    buffers=("projection",),
)
PERFORMER = Spec(
    state_specs.exponential_state,
    weight_shapes.projected_weights,
    {**RBF.options, "map": Option("favor", ("favor", "simplified"))},
    rules=(check_rotary,),
    buffers=("projection",),
)
SOFT_VQ = Spec(
    state_specs.soft_vq_state,
    weight_shapes.soft_vq_weights,
    {**ROTARY, "codewords": Option(64, WIDTH), "beta": Option(1.0, (0.0, 1e9))},
    rules=(check_rotary,),
)
VQ = Spec(
    state_specs.vq_state,
    weight_shapes.vq_weights,
    {
        "codewords": Option(64, WIDTH),
        "window": Option(64, WIDTH),
        "commitment": Option(0.02, (0.0, 1e9)),
    },
    buffers=("codebook", "ema_count"),
)
COSFORMER = Spec(
    state_specs.cosformer_state,
    weight_shapes.heads_weights,
    {"horizon": Option(4096, (2, 2**20))},
    rules=(check_horizon,),
)
DIJIANG = Spec(state_specs.decayed_state, weight_shapes.dijiang_weights)
RETNET = Spec(
    state_specs.decayed_state,
    weight_shapes.gated_output_weights,
    {
        "positions": Option("xpos", ("xpos", "rotary", "none")),
        "key_dim": Option(0, WIDTH_OR_NONE),
    },
    rules=(check_rotary,),
)
WINDOW_LINEAR = Spec(
    state_specs.window_linear_state,
    weight_shapes.projected_weights,
    {
        **ROTARY,
        "rotary": Option("before", ("none", "before")),
        "window": Option(64, WIDTH),
        "features": Option(0, WIDTH_OR_NONE),
    },
    rules=(check_rotary,),
)
NORMED = Spec(
    state_specs.normed_state,
    weight_shapes.normed_weights,
    {
        "map": Option("product", ("product", "elu", "relu", "identity")),
        "key_dim": Option(0, WIDTH_OR_NONE),
    },
)
GATED = Spec(
    state_specs.convolved_state,
    weight_shapes.gated_weights,
    {
        "conv_size": Option(4, (0, 1024)),
        "decay_rank": Option(16, WIDTH),
        "key_dim": Option(0, WIDTH_OR_NONE),
    },
    rules=(check_convolution,),
)
DELTA = Spec(
    state_specs.convolved_state,
    weight_shapes.delta_weights,
    {
        "conv_size": Option(4, (0, 1024)),
        "decay": Option(True),
        "key_dim": Option(0, WIDTH_OR_NONE),
        "gate": Option(True),
        "negative_eigenvalues": Option(False),
    },
    rules=(check_convolution,),
)
SOFTMAX = Spec(
    state_specs.softmax_state,
    weight_shapes.heads_weights,
    {**ROTARY, "rotary": Option("before", ("none", "before"))},
    rules=(check_rotary,),
    constant_state=False,
)
