"""A session that comes from the store with a command, and what a command without one may find."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from server.engine.value import Past
from server.runtime.engine_thread import EngineLike
from server.store.errors import StoreFailed


class Absent(Enum):
    """The engine does not have the session that a command is for; nothing has changed."""

    ABSENT = auto()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A loaded session, which the engine restores before it runs the command that brings it.

    ``generation`` is `AsyncEngine.generation` before the store was read. With ``goes_on``
    another replica has just run it, and its request goes on without a reader.
    """

    past: Past
    generation: int
    goes_on: bool = False


def restore(engine: EngineLike, now: float, arrival: Arrival, generation: int) -> None:
    """On the engine thread, where ``generation`` is the present one. Raises `RequestError`."""
    if generation != arrival.generation:
        raise StoreFailed("the session store failed just now; try again")
    engine.restore(arrival.past, now)
    if arrival.goes_on:
        engine.go_on(arrival.past.value.id, arrival.past.value.owner)
