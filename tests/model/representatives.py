"""Which mechanisms a test crosses with its other parameters: one of each kind, the others once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
V = TypeVar("V")

#: Positive features, a decay, the delta rule, random features, codes, a window; RWKV-7; and
#: attention over a bounded past.
REPRESENTATIVES = ("elu", "gated", "delta", "performer", "vq", "window_linear", "rwkv7", "qwen35")


def chosen(cases: Iterable[T], values: Sequence[V]) -> list[tuple[T, V]]:
    """A representative without options is paired with every value, any other case with one in turn.

    A case is a mechanism's name, or a pair of it and its options.
    """
    return [
        (case, value)
        for index, case in enumerate(cases)
        for value in (values if is_representative(case) else [values[index % len(values)]])
    ]


def is_representative(case: object) -> bool:
    """Whether ``case`` is one of `REPRESENTATIVES` as it is by default."""
    name, options = case if isinstance(case, tuple) else (case, {})
    return name in REPRESENTATIVES and not options
