"""How long readers wait after each kind of fault until another replica continues."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

#: A connection that brings events for so long after a fault was not broken by it.
UNBROKEN_S = 0.5


@dataclass
class _Wait:
    """A reader whose replica was struck; ``attachment`` is the connection that it had."""

    kind: str
    since_s: float
    attachment: object
    over_s: float | None = None


@dataclass
class Waits:
    """From the last event of a connection that a fault struck to the first one of the next.

    It begins with the fault at the earliest. A second fault before its end makes it a wait
    of kind ``several``. A reader whose connection continues by itself has not waited for
    anybody: it is one of ``num_unbroken``.
    """

    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_unbroken: Counter[str] = field(default_factory=Counter)
    _waiting: dict[str, _Wait] = field(default_factory=dict)

    def struck(self, kind: str, reader: str, attachment: object, now_s: float) -> None:
        """``reader`` reads on ``attachment``, at whose other end something has happened."""
        if (wait := self._waiting.get(reader)) is None:
            self._waiting[reader] = _Wait(kind, now_s, attachment)
        elif wait.kind != kind:
            wait.kind = "several"

    def over(self, kind: str, now_s: float, counts_from_now: bool) -> None:
        """The fault is over. Where no replica could continue before, waits for it begin now."""
        for wait in self._waiting.values():
            if wait.kind == kind:
                wait.over_s = now_s
                if counts_from_now:
                    wait.since_s = now_s

    def event(self, reader: str, attachment: object, now_s: float) -> None:
        """A new event has come."""
        wait = self._waiting.get(reader)
        if wait is None:
            return
        if wait.attachment is not attachment:
            del self._waiting[reader]
            self.seconds[wait.kind].append(max(0.0, now_s - wait.since_s))
        elif wait.over_s is not None and now_s > wait.over_s + UNBROKEN_S:
            del self._waiting[reader]
            self.num_unbroken[wait.kind] += 1
        else:
            wait.since_s = now_s  # it still has what came before the fault: it does not wait yet

    def left(self, reader: str) -> None:
        """It waits no more: its session was lost with the store."""
        self._waiting.pop(reader, None)


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that so many per cent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
