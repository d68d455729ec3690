"""The attention mechanisms by name. A new one costs a file and a line here."""

from __future__ import annotations

from importlib import import_module

from model.attention.base import Attention

#: name -> (module, class). Imported when asked for, so that a config file costs no imports.
MECHANISMS: dict[str, tuple[str, str]] = {
    "elu": ("model.attention.elu", "EluAttention"),
    "gated": ("model.attention.gated", "GatedAttention"),
    "softmax": ("model.attention.softmax", "SoftmaxAttention"),
}


def mechanism(name: str) -> type[Attention]:
    """The class called ``name``; raises `ConfigError` with the known names otherwise."""
    from model.config import ConfigError

    if name not in MECHANISMS:
        raise ConfigError(f"attention {name!r} is unknown (known: {', '.join(MECHANISMS)})")
    module, class_name = MECHANISMS[name]
    cls: type[Attention] = getattr(import_module(module), class_name)
    return cls
