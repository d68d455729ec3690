"""The life of a request as a table: which phase may follow which.

    waiting -> prefill -> decode -> finished

A request that only feeds tokens goes from prefill to finished; any phase may
end early when the request is cancelled or fails.
"""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """Where a live request is."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()


_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.FINISHED}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.FINISHED}),
    Phase.DECODE: frozenset({Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


def check_move(old: Phase, new: Phase) -> None:
    """Asserts that the table allows the move."""
    assert new in _NEXT[old], f"{old.name} -> {new.name}"
