"""One thread owns the engine: commands go in, events come out, in batches of one step.

The event loop posts commands to a bounded mailbox and is woken once per step for
all that the step made, or once for several steps where it is behind. The engine
never waits for a client: a reader that does not keep up overflows its own outbox
and loses its requests. It does wait for the event loop itself, when that is
`MAX_UNDELIVERED` steps behind: a slow server is not a reason to cut off its readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from server.engine.errors import EngineError, InternalFailure, InvalidRequest, QueueFull
from server.engine.types import EngineStats, Event, Request, SessionInfo
from server.mailbox import Mailbox
from server.metrics import Metrics
from server.readers import Readers, Sink

logger = logging.getLogger("everstream.driver")

MAX_COMMANDS = 4096
MAX_UNDELIVERED = 16
STALL_S = 5.0

R = TypeVar("R")
Clock = Callable[[], float]


class Draining(EngineError):
    """The server is about to stop and takes no new work."""

    code = "draining"

    def __init__(self) -> None:
        super().__init__("the server is draining; try another one")


class EngineLike(Protocol):
    """What the driver needs of `server.engine.engine.Engine`; see there."""

    def submit(self, request: Request, now: float) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def create_session(self, owner: str, now: float) -> SessionInfo: ...
    def session_info(self, session: str, owner: str, now: float) -> SessionInfo: ...
    def delete_session(self, session: str, owner: str) -> None: ...
    def step(self, now: float) -> list[Event]: ...
    def has_work(self) -> bool: ...
    def next_expiry(self) -> float | None: ...
    def expire(self, now: float) -> None: ...
    def stats(self) -> EngineStats: ...


@dataclass(slots=True)
class _Command:
    """A call on the engine, and the future in the event loop that wants its result."""

    call: Callable[[EngineLike, float], Any]
    future: asyncio.Future[Any] | None
    request_id: str | None = None
    result: Any = None
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """What one turn of the engine's thread has made, and when it was done."""

    commands: list[_Command]
    events: list[Event]
    done_s: float


class Driver:
    """Asynchronous access to an engine. All methods belong to one event loop.

    Call `start` before and `stop` after use. ``died`` is set when the engine's
    thread ended by an error; it never recovers.
    """

    def __init__(self, engine: EngineLike, clock: Clock, metrics: Metrics) -> None:
        self.metrics = metrics
        self.died = asyncio.Event()
        self._engine = engine
        self._clock = clock
        self._mailbox: Mailbox[_Command] = Mailbox(MAX_COMMANDS)
        self._undelivered = threading.Semaphore(MAX_UNDELIVERED)
        self._steps: deque[_Step] = deque()
        self._awaits_delivery = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers = Readers(metrics)
        self._calls: set[asyncio.Future[Any]] = set()
        self._draining = False
        self._working_since: float | None = None
        self._last_stats = engine.stats()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, timeout_s: float = STALL_S) -> bool:
        """Ends the thread after its current step; False if it did not end in time."""
        self._mailbox.close()
        await asyncio.to_thread(self._thread.join, timeout_s)
        self._fail_all(InternalFailure("the server has stopped"))
        return not self._thread.is_alive()

    # Work

    async def submit(self, request: Request, sink: Sink) -> None:
        """Starts a request; its events go to ``sink``. Raises `EngineError`.

        The caller calls `release` with the sink when nobody reads it any more.
        """
        if self._draining:
            raise Draining
        if request.request_id in self._readers:
            raise InvalidRequest("request_id: is in use by a live request", "request_id")
        self._readers.add(request.request_id, sink, self._clock())
        try:
            await self._call(lambda engine, now: engine.submit(request, now), request.request_id)
        except EngineError:
            self._readers.forget(request.request_id)
            raise

    def cancel(self, request_id: str) -> None:
        """Asks for the end of a request; its `Finished` event comes through the sink."""
        command = _Command(lambda engine, now: engine.cancel(request_id), None)
        self._mailbox.post(command, urgent=True)

    def release(self, sink: Sink) -> None:
        """Cancels every live request of ``sink``: its reader is gone."""
        for request_id in self._readers.requests(sink):
            self.cancel(request_id)

    async def create_session(self, owner: str) -> SessionInfo:
        if self._draining:
            raise Draining
        return await self._call(lambda engine, now: engine.create_session(owner, now))

    async def session_info(self, session: str, owner: str) -> SessionInfo:
        return await self._call(lambda engine, now: engine.session_info(session, owner, now))

    async def delete_session(self, session: str, owner: str) -> None:
        await self._call(lambda engine, now: engine.delete_session(session, owner))

    async def stats(self) -> EngineStats:
        """The engine's counts; the last known ones where it does not answer any more."""
        if self.healthy:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(STALL_S):
                    self._last_stats = await self._call(lambda engine, now: engine.stats())
        return self._last_stats

    # Life

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread lives and its current step is not `STALL_S` old."""
        since = self._working_since
        stalled = since is not None and self._clock() - since > STALL_S
        return self._thread.is_alive() and not self.died.is_set() and not stalled

    @property
    def ready(self) -> bool:
        return self.healthy and not self._draining

    def begin_drain(self) -> None:
        """Refuses new work from here on; what runs goes on."""
        self._draining = True

    async def drained(self) -> None:
        """Returns when no request is live."""
        await self._readers.idle.wait()

    def cancel_all(self) -> None:
        for request_id in self._readers.requests():
            self.cancel(request_id)

    # The event loop's side

    async def _call(
        self, call: Callable[[EngineLike, float], R], request_id: str | None = None
    ) -> R:
        if self.died.is_set():
            raise InternalFailure("the engine has stopped")
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if not self._mailbox.post(_Command(call, future, request_id)):
            raise QueueFull("too many commands wait for the engine")
        self._calls.add(future)
        try:
            return await future
        finally:
            self._calls.discard(future)

    def _deliver(self) -> None:
        """Runs in the event loop, for all steps that wait: each reader gets its events at once."""
        self._awaits_delivery = False  # before the look at the steps: see `_turn`
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        if not steps:
            return
        self._undelivered.release(len(steps))
        batches: dict[Sink, list[Event]] = {}
        for step in steps:
            for command in step.commands:
                self._answer(command)
            self._readers.sort(step.events, step.done_s, batches)
        for sink, events in batches.items():
            if not sink.put(events):
                self.release(sink)

    def _answer(self, command: _Command) -> None:
        if command.error is not None and command.request_id is not None:
            self._readers.forget(command.request_id)
        if command.future is None or command.future.done():
            return
        if command.error is not None:
            command.future.set_exception(command.error)
        else:
            command.future.set_result(command.result)

    def _die(self) -> None:
        self.died.set()
        self._fail_all(InternalFailure("the engine has stopped"))

    def _fail_all(self, error: EngineError) -> None:
        for future in list(self._calls):
            if not future.done():
                future.set_exception(error)
        self._readers.fail_all(error)

    # The engine's thread

    def _run(self) -> None:
        assert self._loop is not None
        try:
            while (commands := self._mailbox.take(self._patience_s())) is not None:
                self._turn(commands)
        except Exception:
            logger.exception("the engine failed")
            self._mailbox.close()
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                self._loop.call_soon_threadsafe(self._die)

    def _patience_s(self) -> float | None:
        """How long the thread may sleep if no command comes: for ever, unless there is work."""
        if self._engine.has_work():
            return 0.0
        expiry = self._engine.next_expiry()
        return None if expiry is None else max(0.0, expiry - self._clock())

    def _turn(self, commands: list[_Command]) -> None:
        assert self._loop is not None
        now = self._working_since = self._clock()
        for command in commands:
            self._execute(command, now)
        self._engine.expire(now)
        events = self._engine.step(now)
        self._working_since = None
        if commands or events:
            self._undelivered.acquire()
            self._steps.append(_Step(commands, events, self._clock()))
            if not self._awaits_delivery:  # else the delivery that is due finds this step too
                self._awaits_delivery = True
                self._loop.call_soon_threadsafe(self._deliver)

    def _execute(self, command: _Command, now: float) -> None:
        try:
            command.result = command.call(self._engine, now)
        except EngineError as error:
            command.error = error
        except Exception:
            logger.exception("a command failed")
            command.error = InternalFailure("the engine could not do this")
