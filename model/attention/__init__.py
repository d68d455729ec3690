"""The attention mechanisms by name. A new one costs a file and a line here.

Importing this imports no torch; `model.attention.base.mechanism` does.
"""

from __future__ import annotations

from model.attention import specs
from model.attention.specs import Spec
from model.files import ConfigError

#: name -> (spec, module, class). The module is imported when asked for.
MECHANISMS: dict[str, tuple[Spec, str, str]] = {
    "elu": (specs.LINEAR, "model.attention.linear", "EluAttention"),
    "relu": (specs.LINEAR, "model.attention.linear", "ReluAttention"),
    "softmax_map": (specs.LINEAR, "model.attention.linear", "SoftmaxMapAttention"),
    "efficient": (specs.EFFICIENT, "model.attention.efficient", "EfficientAttention"),
    "cosine": (specs.COSINE, "model.attention.cosine", "CosineAttention"),
    "performer": (specs.PERFORMER, "model.attention.performer", "PerformerAttention"),
    "rbf": (specs.RBF, "model.attention.performer", "RbfAttention"),
    "vq": (specs.VQ, "model.attention.vq", "VqAttention"),
    "soft_vq": (specs.SOFT_VQ, "model.attention.soft_vq", "SoftVqAttention"),
    "cosformer": (specs.COSFORMER, "model.attention.cosformer", "CosformerAttention"),
    "dijiang": (specs.DIJIANG, "model.attention.dijiang", "DijiangAttention"),
    "retnet": (specs.RETNET, "model.attention.retnet", "RetnetAttention"),
    "window_linear": (
        specs.WINDOW_LINEAR,
        "model.attention.window_linear",
        "WindowLinearAttention",
    ),
    "normed": (specs.NORMED, "model.attention.normed", "NormedAttention"),
    "gated": (specs.GATED, "model.attention.gated", "GatedAttention"),
    "delta": (specs.DELTA, "model.attention.delta", "DeltaAttention"),
    "softmax": (specs.SOFTMAX, "model.attention.softmax", "SoftmaxAttention"),
}

#: Names that people will try, and why they cannot be read token by token with a constant state.
REFUSED: dict[str, str] = {
    "fnet": "its Fourier transform runs over the positions, so each output needs later tokens",
    "dcformer": "its cosine transform runs over the positions, so each output needs later tokens",
    "linformer": "it mixes positions when it projects n of them to k, so a prefix changes with"
    " what follows",
    "reformer": "its hashing only chooses which of all past keys to read, so all must be kept",
    "pooling": "it merges neighbouring positions, so a token sees tokens that follow it",
    "flowformer": "its competition is a softmax over all positions, so each output needs later"
    " tokens",
}

#: Names that could be read so, and why they are not built.
NOT_BUILT: dict[str, str] = {
    "gau": "its attention is exact within blocks, whose length would enter the result;"
    " 'window_linear' has a window that slides",
    "hydra": "its weights have both signs and no norm; the nearest is 'normed' with map 'identity'",
    "kda": "it is 'delta' with channel_decay true, but for its gate, a sigmoid of low rank",
    "taylor": "the kernel of second order is 'cosine' with order 2 and unit_length false",
}


def spec_of(name: str) -> Spec:
    """What is known of ``name`` without torch; raises `ConfigError` as `entry` does."""
    return entry(name)[0]


def entry(name: str) -> tuple[Spec, str, str]:
    """Spec, module and class of ``name``; raises `ConfigError` with the known names otherwise."""
    if name in REFUSED:
        raise ConfigError(
            f"attention {name!r} cannot be autoregressive with a constant state: {REFUSED[name]}"
        )
    if name in NOT_BUILT:
        raise ConfigError(f"attention {name!r} is not built: {NOT_BUILT[name]}")
    if name not in MECHANISMS:
        raise ConfigError(f"attention {name!r} is unknown (known: {', '.join(MECHANISMS)})")
    return MECHANISMS[name]
