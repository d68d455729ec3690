"""The attention mechanisms by name. A new one costs a file and a line here."""

from __future__ import annotations

from importlib import import_module

from model.attention.base import Attention

#: name -> (module, class). Imported when asked for, so that a config file costs no imports.
MECHANISMS: dict[str, tuple[str, str]] = {
    "elu": ("model.attention.elu", "EluAttention"),
    "relu": ("model.attention.relu", "ReluAttention"),
    "softmax_map": ("model.attention.softmax_map", "SoftmaxMapAttention"),
    "efficient": ("model.attention.efficient", "EfficientAttention"),
    "cosine": ("model.attention.cosine", "CosineAttention"),
    "performer": ("model.attention.performer", "PerformerAttention"),
    "rbf": ("model.attention.rbf", "RbfAttention"),
    "vq": ("model.attention.vq", "VqAttention"),
    "soft_vq": ("model.attention.soft_vq", "SoftVqAttention"),
    "cosformer": ("model.attention.cosformer", "CosformerAttention"),
    "dijiang": ("model.attention.dijiang", "DijiangAttention"),
    "retnet": ("model.attention.retnet", "RetnetAttention"),
    "window_linear": ("model.attention.window_linear", "WindowLinearAttention"),
    "normed": ("model.attention.normed", "NormedAttention"),
    "gated": ("model.attention.gated", "GatedAttention"),
    "delta": ("model.attention.delta", "DeltaAttention"),
    "softmax": ("model.attention.softmax", "SoftmaxAttention"),
}

#: Names that people will try, and why they cannot be read token by token with a constant state.
REFUSED: dict[str, str] = {
    "fnet": "its Fourier transform runs over the positions, so each output needs later tokens",
    "dcformer": "its cosine transform runs over the positions, so each output needs later tokens",
    "linformer": "it mixes positions when it projects n of them to k, so a prefix changes with"
    " what follows",
    "reformer": "its hashing only chooses which of all past keys to read, so all must be kept",
    "pooling": "it merges neighbouring positions, so a token sees tokens that follow it",
}


def mechanism(name: str) -> type[Attention]:
    """The class called ``name``; raises `ConfigError` with the known names otherwise."""
    from model.config import ConfigError

    if name in REFUSED:
        raise ConfigError(
            f"attention {name!r} cannot be autoregressive with a constant state: {REFUSED[name]}"
        )
    if name not in MECHANISMS:
        raise ConfigError(f"attention {name!r} is unknown (known: {', '.join(MECHANISMS)})")
    module, class_name = MECHANISMS[name]
    cls: type[Attention] = getattr(import_module(module), class_name)
    return cls
