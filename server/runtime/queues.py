"""The four queues between the event loop, the engine thread and the store thread, all bounded."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from server.engine.prefixes import Evicted
from server.engine.session import Accepted, Record
from server.engine.types import Event, Failed, Finished, TokenEvent
from server.errors import RequestError
from server.runtime.commands import Command
from server.store.base import Store, StoreError

# -------------------------------------------------------------------------------------------------
# The bounded queue of commands into the engine's thread. It sleeps; nothing polls.


T = TypeVar("T")


class CommandQueue(Generic[T]):
    """Many writers, one taker, any thread."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def post(self, item: T, *, urgent: bool = False) -> bool:
        """Adds an item; False if the box is full or closed.

        ``urgent`` passes the bound, for commands that give something back, such
        as a cancel: there are never more of them than of live requests.
        """
        with self._changed:
            if self._closed or (len(self._items) >= self._max_items and not urgent):
                return False
            self._items.append(item)
            self._changed.notify()
            return True

    def close(self) -> None:
        """Refuses further items. Those inside are still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, timeout_s: float | None) -> list[T] | None:
        """All items; sleeps for the first one up to ``timeout_s`` (None: no limit, 0: not at all).

        Returns an empty list after the timeout, and None once the box is closed and empty.
        """
        if timeout_s == 0 and not self._items and not self._closed:
            return []  # while the engine has work, without the lock
        with self._changed:
            if timeout_s is None or timeout_s > 0:
                self._changed.wait_for(lambda: self._items or self._closed, timeout_s)
            if self._closed and not self._items:
                return None
            items = list(self._items)
            self._items.clear()
            return items


# -------------------------------------------------------------------------------------------------
# The bounded queue of steps to the event loop, from the engine thread and the store thread.
#
# A step comes from the store thread once its records are safe, and from the engine thread
# where it has nothing to log. The event loop is woken once for all steps that wait.


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
        #: Places, of all steps so far: those that the engine thread took, and got back. Each is
        #: changed by one thread, so that neither takes a lock unless the engine thread waits.
        self._num_reserved = self._num_released = 0
        self._released = threading.Condition()
        self._is_waiting = False
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
        if self.num_free < num_places:
            with self._released:
                self._is_waiting = True  # before the look at the places: see `take`
                self._released.wait_for(lambda: self.num_free >= num_places)
                self._is_waiting = False
        self._num_reserved += num_places
        return num_places

    @property
    def num_free(self) -> int:
        """Places that no step has."""
        return MAX_UNDELIVERED - self._num_reserved + self._num_released

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
        for step in steps:
            self._num_released += step.num_places
        if self._is_waiting:
            with self._released:
                self._released.notify()
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


# -------------------------------------------------------------------------------------------------
# A bounded queue from the async engine to one reader, which reports overflow and never waits.
#
# One reader may own several requests (a WebSocket does), so that one wake-up of
# its sender takes all that a step made for it. Mostly it need not even wake up:
# see `EventQueue.take`.


#: What can be undelivered when a reader is paused: 32 tokens of each of 128 requests.
MAX_IN_FLIGHT = 4096


class ReaderTooSlow(RequestError):
    """The client did not read its events before the event queue was full."""

    code = "reader_too_slow"
    message = "the client reads too slowly; its requests were cancelled"


class EventQueue(Generic[T]):
    """Items for one reader, in order. Lives in the event loop; not thread safe.

    ``on_backpressure`` is called with True for each `put` that leaves it half full or
    more, and with False once the reader has taken all of that. As what is on its
    way then still comes, there is room for ``spare`` items more. ``broken`` is
    done, with the error as its result, once the event queue overflowed anyway,
    or failed: what waited is dropped, `put` has no effect and `take` raises. A
    reader that may hang in a send watches it.
    """

    def __init__(
        self, max_items: int, on_backpressure: Callable[[bool], None] | None = None, spare: int = 0
    ) -> None:
        self._max_items, self._spare = max_items, spare
        self._on_backpressure = on_backpressure or (lambda full: None)
        self._has_backpressure = False
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[bool] | None = None
        self._taken: asyncio.Future[None] | None = None
        self._direct_write: Callable[[Sequence[T]], bool] | None = None
        self.broken: asyncio.Future[RequestError] = asyncio.get_running_loop().create_future()

    def put(self, items: Sequence[T]) -> bool:
        """Adds items; False where these very items made the event queue overflow."""
        if self.broken.done():
            return True
        if self._direct_write is not None and self._direct_write(items):
            return True
        if len(self._items) + len(items) > self._max_items + self._spare:
            self.fail(ReaderTooSlow())
            return False
        self._items.extend(items)
        self._wake()
        if len(self._items) * 2 >= self._max_items:
            self._has_backpressure = True
            self._on_backpressure(True)
        return True

    async def emptied(self) -> None:
        """Returns when the reader has taken all that was put, or never will."""
        while self._items and not self.broken.done():
            if self._taken is None:
                self._taken = asyncio.get_running_loop().create_future()
            watched: set[asyncio.Future[Any]] = {self._taken, self.broken}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)

    def fail(self, error: RequestError) -> None:
        """Drops what waits and lets the reader see ``error``. The first failure counts."""
        if self.broken.done():
            return
        self.broken.set_result(error)
        self._items.clear()
        self._wake()

    async def take(self, direct_write: Callable[[Sequence[T]], bool] | None = None) -> list[T]:
        """All waiting items, at least one; raises the `RequestError` of a broken event queue.

        Returns none only where `nudge` ended the wait. As long as it waits, `put` offers its
        items to ``direct_write``. Where that returns True it has dealt with them, and the
        reader sleeps on.
        """
        while not self._items:
            if self.broken.done():
                raise self.broken.result()
            self._waiter = asyncio.get_running_loop().create_future()
            self._direct_write = direct_write
            try:
                is_nudged = await self._waiter
            finally:
                self._waiter = self._direct_write = None
            if is_nudged:
                break
        items = list(self._items)
        self._items.clear()
        if self._taken is not None:
            self._taken.set_result(None)
            self._taken = None
        if self._has_backpressure:
            self._has_backpressure = False
            self._on_backpressure(False)
        return items

    def nudge(self) -> None:
        """Lets a reader that waits in `take` return without items."""
        self._wake(is_nudged=True)

    def _wake(self, is_nudged: bool = False) -> None:
        self._direct_write = None  # what comes now must not overtake what waits
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(is_nudged)


# -------------------------------------------------------------------------------------------------
# The queue to the store thread: steps of the engine thread, and questions of the event loop.
#
# Steps are bounded by the room of `DeliveryQueue`, questions by the clients that wait for them.


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Question:
    """Asked in the store thread, in its turn."""

    ask: Callable[[Store], Any]
    future: Future[Any] = field(default_factory=Future)


class StoreQueue:
    """In order. One taker, which is busy from `take` to the next `take`."""

    def __init__(self) -> None:
        self._items: deque[EngineStep | Question] = deque()
        self._question: Question | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._busy = False

    def add(self, step: EngineStep) -> bool:
        """False where there is nothing to log or to wait for: then the step is not added.

        What was seen of a session waits too: its last records may be lost already.
        """
        # Without the lock, which `take` holds: it is busy before it takes items out.
        has_entries = step.records or any(command.logged for command in step.commands)
        if not (has_entries or self._items or self._busy):
            return False
        with self._changed:
            self._items.append(step)
            self._changed.notify()
            return True

    def ask(self, ask: Callable[[Store], R]) -> Future[R]:
        """A question to the store, after all that has been added before."""
        question = Question(ask)
        with self._changed:
            if self._closed:
                question.future.set_exception(StoreError("the store is closed"))
            else:
                self._items.append(question)
                self._changed.notify()
        return question.future

    def take(self, timeout_s: float) -> tuple[list[EngineStep], Question | None] | None:
        """The steps before the next question, and that question; nothing after the timeout.

        None once the queue is closed and empty.
        """
        with self._changed:
            self._busy = False
            if not self._items and not self._closed:
                self._changed.wait(timeout_s)
            if self._closed and not self._items:
                return None
            self._busy = True
            steps: list[EngineStep] = []
            self._question = None
            while self._items and self._question is None:
                item = self._items.popleft()
                if isinstance(item, Question):
                    self._question = item
                else:
                    steps.append(item)
            return steps, self._question

    def close(self) -> None:
        """Refuses further questions. What is inside is still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def fail(self, error: RequestError) -> None:
        """Closes the queue; all questions that have no answer get ``error``."""
        with self._changed:
            self._closed = True
            unanswered = [self._question, *self._items]
        for item in unanswered:
            if isinstance(item, Question) and not item.future.done():
                item.future.set_exception(error)
