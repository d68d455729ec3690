"""The bounded queue of steps to the event loop, from the engine thread and the store thread.

A step comes from the store thread once its records are safe, and from the engine thread
where it has nothing to log. The event loop is woken once for all steps that wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from server.engine.prefix import Evicted
from server.engine.types import Event, Failed, Finished, TokenEvent
from server.engine.value import Accepted, Record
from server.errors import RequestError
from server.runtime.commands import Command

#: Tokens of one request in the steps that the event loop has not taken yet; mostly one a step.
MAX_UNDELIVERED = 16


@dataclass(slots=True)
class EngineStep:
    """What one turn of the engine thread has made, and when it was done.

    ``generation`` counts the times that the engine has forgotten its kept sessions.
    ``lost`` has the sessions whose records are not in the store, and why.
    ``freed_bytes`` are those of the requests that have ended.
    ``is_idle``: the engine had nothing to compute after it. ``num_places`` of the delivery queue
    are taken for it: the greatest number of tokens that one request has got.
    """

    generation: int
    commands: list[Command] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    prefixes: list[Evicted] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    freed_bytes: int = 0
    lost: dict[str, RequestError] = field(default_factory=dict)
    is_idle: bool = False
    done_s: float = 0.0
    num_places: int = 1

    def lose(self) -> None:
        """Removes what has not been logged: it must not be seen. A request that it ended fails."""
        for command in self.commands:
            if command.error is None:
                lost = (self.lost[id] for id in command.logged if id in self.lost)
                command.error = next(lost, None)
        errors = {
            _request_id(entry): self.lost[id] for id, entry in self.records if id in self.lost
        }
        events: list[Event] = []
        for event in self.events:
            if (error := errors.get(event.request_id)) is None:
                events.append(event)
            elif isinstance(event, Finished):  # the engine has no such request to fail any more
                events.append(Failed(event.request_id, error))
        self.events = events


class DeliveryQueue:
    """``deliver`` is called in the event loop when steps wait, and ``died`` at `end`."""

    def __init__(self, deliver: Callable[[], None], died: Callable[[], None]) -> None:
        self._deliver, self._died = deliver, died
        self._steps: deque[EngineStep] = deque()
        self._room = threading.Semaphore(MAX_UNDELIVERED)
        self._is_delivery_due = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Before the threads start."""
        self._loop = loop

    def reserve(self, num_tokens: int) -> int:
        """Waits in the engine thread until there is room for a step; how many places that takes.

        ``num_tokens``: the greatest number that one request has got in it.
        """
        num_places = min(num_tokens, MAX_UNDELIVERED)
        for _ in range(num_places):
            self._room.acquire()
        return num_places

    def put(self, step: EngineStep) -> None:
        """Has the event loop take the step, with all that wait by then."""
        self._steps.append(step)
        if not self._is_delivery_due:  # else the delivery that is due finds this step too
            self._is_delivery_due = True
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                self._loop.call_soon_threadsafe(self._deliver)

    def take(self) -> list[EngineStep]:
        """In the event loop: all steps that wait. The engine thread has their room again."""
        self._is_delivery_due = False  # before the look at the steps: see `put`
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        if steps:
            self._room.release(sum(step.num_places for step in steps))
        return steps

    def end(self) -> None:
        """From a thread that cannot continue."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # as above
            self._loop.call_soon_threadsafe(self._died)


def _request_id(entry: object) -> str | None:
    if isinstance(entry, TokenEvent | Finished):
        return entry.request_id
    return entry.request.request_id if isinstance(entry, Accepted) else None
