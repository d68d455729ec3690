"""The mechanisms' specs: their options, and where their state and weights are written down."""

from __future__ import annotations

from model.attention import state_specs, weight_shapes
from model.attention.spec import AttentionConfig, Option, Options, Spec, key_dim
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


def check_horizon(config: AttentionConfig, options: Options) -> None:
    """Refuses a horizon that has no half."""
    if options["horizon"] % 2:
        raise ConfigError(f"attention_options.horizon must be even, not {options['horizon']}")


LINEAR = Spec(
    state_specs.linear_state,
    weight_shapes.heads_weights,
    {**PLAIN, **ROTARY, "rotary": Option("none", ("none", "before", "after"))},
    rules=(check_rotary,),
)
COSINE = Spec(
    state_specs.cosine_state,
    weight_shapes.heads_weights,
    {**PLAIN, **ROTARY},
    rules=(check_rotary,),
)
EFFICIENT = Spec(
    state_specs.exponential_state,
    weight_shapes.heads_weights,
    {**PLAIN, **ROTARY},
    rules=(check_rotary,),
)
RBF = Spec(
    state_specs.exponential_state,
    weight_shapes.projected_weights,
    {**PLAIN, **ROTARY, "features": Option(0, WIDTH_OR_NONE), "orthogonal": Option(True)},
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
    {**PLAIN, **ROTARY, "codewords": Option(64, WIDTH), "beta": Option(1.0, (0.0, 1e9))},
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
    },
    buffers=("codebook", "ema_count"),
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
    buffers=("frequency_draw",),
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
    weight_shapes.projected_weights,
    {
        **PLAIN,
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
    },
)
SOFTMAX = Spec(
    state_specs.softmax_state,
    weight_shapes.heads_weights,
    {**PLAIN, **ROTARY, "rotary": Option("before", ("none", "before"))},
    rules=(check_rotary,),
    constant_state=False,
)
