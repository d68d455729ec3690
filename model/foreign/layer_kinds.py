"""What the layers of a hybrid are, as folders say it layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from model.files import ConfigError
from model.foreign.config import DENSE_ALONE, ForeignConfig


def layers_of(kinds: Iterable[str], kind: str) -> tuple[int, ...]:
    """Indices of the layers of one of the ``kinds`` of all layers."""
    return tuple(layer for layer, each in enumerate(kinds) if each == kind)


def attention_layers(
    source: ForeignConfig, num_layers: int, kinds: tuple[str, str], interval: int
) -> tuple[int, ...]:
    """Indices of the layers of the second of ``kinds`` in ``layer_types``.

    Where there is no such field every ``interval``-th layer is one. Raises `ConfigError`.
    """
    usual = [kinds[(layer + 1) % interval == 0] for layer in range(num_layers)]
    return layers_of(layer_kinds(source, usual, kinds), kinds[1])


def layer_kinds(source: ForeignConfig, usual: list[str], kinds: tuple[str, ...]) -> list[str]:
    """``layer_types``, of each layer one of ``kinds``; where there is no such field, ``usual``.

    Raises `ConfigError`.
    """
    found = source.anything("layer_types")
    if found is None:
        return usual
    if not isinstance(found, list) or any(kind not in kinds for kind in found):
        names = " and ".join(map(repr, kinds))
        raise ConfigError(
            f"{source.family}: layer_types must be a list of {names}, not {found!r:.200}"
        )
    if len(found) != len(usual):
        raise ConfigError(f"{source.family}: layer_types has {len(found)} of {len(usual)} layers")
    return found


#: What folders of hybrids over Mamba call the kinds of layers, in lists and in the letters of a
#: pattern.
_KINDS = {
    **dict.fromkeys(("mamba", "linear_attention", "M"), "mamba"),
    **dict.fromkeys(("attention", "full_attention", "*"), "attention"),
    **dict.fromkeys(("mlp", "-"), "mlp"),
    **dict.fromkeys(("moe", "E"), "moe"),
}
#: The fields that say it: lists, and a pattern of letters.
PATTERNS = ("layer_types", "layers_block_type", "hybrid_override_pattern")


def _kinds_in(found: Any) -> list[str]:
    """Those of a list or a pattern of letters; "" for an unknown one."""
    letters = found if isinstance(found, list) else str(found)
    return [_KINDS.get(str(kind), "") for kind in letters]


def mamba_kinds(source: ForeignConfig, *known: str) -> list[str]:
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
        names = ", ".join(repr(kind) for kind, ours in _KINDS.items() if ours in known)
        raise ConfigError(f"{source.family}: {name} must be a list of {names}, not {found!r:.200}")
    num_layers = source.num_layers("num_hidden_layers", len(kinds))
    if len(kinds) != num_layers:
        raise ConfigError(f"{source.family}: {name} has {len(kinds)} of {num_layers} layers")
    return kinds
