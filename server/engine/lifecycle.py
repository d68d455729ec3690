"""The life of a request as a table: which phase may follow which.

    waiting <-> running -> finished
        \\         |
         parked <--

A running request goes back to waiting where others wait for a slot and it has
had its turn. It is parked while its client does not keep up, or is away.
"""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """Where a live request is."""

    WAITING = auto()
    RUNNING = auto()
    PARKED = auto()
    FINISHED = auto()


_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.RUNNING, Phase.PARKED, Phase.FINISHED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.PARKED, Phase.FINISHED}),
    Phase.PARKED: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


def check_move(old: Phase, new: Phase) -> None:
    """Asserts that the table allows the move."""
    assert new in _NEXT[old], f"{old.name} -> {new.name}"
