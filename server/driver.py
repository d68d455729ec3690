"""One thread owns the engine: commands go in, events come out, in batches of one step.

The event loop posts commands to a bounded mailbox and is woken once per step for
all that the step made, or once for several steps where it is behind. Between the
two, `server.journal` makes safe what must be. The engine never waits for a client:
what a reader does not take parks, and one that leaves a kept session is detached
from it. The engine does wait for the event loop and the disk, when these are
`MAX_UNDELIVERED` steps behind: a slow server is not a reason to cut off its readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from server.engine.errors import EngineError, InternalFailure, InvalidRequest, QueueFull
from server.engine.prefix_cache import Evicted
from server.engine.types import EngineStats, Event, Finished, Request, SessionInfo, TokenEvent
from server.engine.value import Accepted, Past, Record, SessionValue, StateBlock
from server.journal import Journal
from server.mailbox import Mailbox
from server.metrics import Metrics
from server.readers import Readers, Sink
from server.store.base import Store
from server.store.errors import StoreFull
from server.tracing import OFF, Tracer

logger = logging.getLogger("everstream.driver")

MAX_COMMANDS = 4096
MAX_UNDELIVERED = 16
STALL_S = 5.0
#: Sessions whose states are copied before the store has written them.
RETIRED_AT_ONCE = 32

R = TypeVar("R")
Clock = Callable[[], float]


class Draining(EngineError):
    """The server is about to stop and takes no new work."""

    code = "draining"

    def __init__(self) -> None:
        super().__init__("the server is draining; try another one")


Room = Literal["max_running", "max_sessions", "max_stored_bytes"]


class TenantLimits(Protocol):
    """What is kept for a tenant; None is no bound."""

    @property
    def max_sessions(self) -> int | None: ...
    @property
    def max_stored_bytes(self) -> int | None: ...


class Tenant(Protocol):
    """An owner with limits: see `server.api.tenants`."""

    @property
    def limits(self) -> TenantLimits: ...

    def check_tokens(self) -> None: ...
    def check_room(self, limit: Room, number: int, /) -> None: ...
    def spend(self, num_tokens: int, /) -> None: ...


class EngineLike(Protocol):
    """What the driver needs of `server.engine.engine.Engine`; see there."""

    def submit(self, request: Request, now: float) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def park(self, request_id: str) -> None: ...
    def unpark(self, request_id: str) -> None: ...
    def detach(self, request_id: str) -> None: ...
    def attach(self, session: str, owner: str, request_id: str, take_over: bool) -> SessionInfo: ...
    def go_on(self, session: str, owner: str) -> None: ...
    def create_session(self, owner: str, now: float) -> SessionInfo: ...
    def session_info(self, session: str, owner: str, now: float) -> SessionInfo: ...
    def cancel_session(self, session: str, owner: str) -> None: ...
    def delete_session(self, session: str, owner: str) -> None: ...
    def value(self, session: str, owner: str) -> SessionValue: ...
    def fork(
        self, session: str, owner: str, num: int, now: float, past: Past | None = None
    ) -> list[SessionInfo]: ...
    def adopt(self, value: SessionValue, owner: str, now: float) -> SessionInfo: ...
    def rewind(self, session: str, owner: str, past: Past, now: float) -> SessionInfo: ...
    def restore(self, past: Past, now: float) -> SessionInfo: ...
    def retire(self, max_sessions: int) -> int: ...
    def discard_kept(self, error: EngineError) -> None: ...
    def insert_prefix(self, owner: str, tokens: tuple[int, ...], block: StateBlock) -> None: ...
    def take_usage(self) -> dict[str, int]: ...
    def num_running(self, owner: str) -> int: ...
    def take_evicted_prefixes(self) -> list[Evicted]: ...
    def take_records(self) -> list[Record]: ...
    def step(self, now: float) -> list[Event]: ...
    def has_work(self) -> bool: ...
    def next_expiry(self) -> float | None: ...
    def expire(self, now: float) -> None: ...
    def stats(self) -> EngineStats: ...


@dataclass(slots=True)
class _Command:
    """A call on the engine, and the future in the event loop that wants its result.

    ``logged`` says that it counts only if the step's records do. ``arrived`` is
    called with the result in the event loop, before any event that came after it,
    unless nobody waits for it any more.
    With a ``generation`` it begins a new one: nothing before it is in the same step.
    """

    call: Callable[[EngineLike, float], Any]
    future: asyncio.Future[Any] | None
    request_ids: tuple[str, ...] = ()
    arrived: Callable[[Any], None] | None = None
    result: Any = None
    error: EngineError | None = None
    logged: bool = False
    generation: int | None = None


@dataclass(slots=True)
class _Step:
    """What one turn of the engine's thread has made, and when it was done."""

    commands: list[_Command]
    events: list[Event]
    records: list[Record]
    generation: int
    done_s: float
    prefixes: list[Evicted] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    lost: EngineError | None = None


class Driver:
    """Asynchronous access to an engine. All methods belong to one event loop.

    Call `start` before and `stop` after use. ``died`` is set when the engine's or
    the store's thread ended by an error; it never recovers.
    """

    def __init__(
        self,
        engine: EngineLike,
        clock: Clock,
        metrics: Metrics,
        store: Store,
        tracer: Tracer = OFF,
    ) -> None:
        self.metrics = metrics
        #: By owner; one that is not in it has no limits.
        self.tenants: Mapping[str, Tenant] = {}
        self.died = asyncio.Event()
        self.durable = store.durable
        self.on_evicted_prefixes: Callable[[list[Evicted]], None] = lambda evicted: None
        self._engine = engine
        self._tracer = tracer
        self._clock = clock
        self._mailbox: Mailbox[_Command] = Mailbox(MAX_COMMANDS)
        self._undelivered = threading.Semaphore(MAX_UNDELIVERED)
        self._steps: deque[_Step] = deque()
        self._awaits_delivery = False
        self._generation = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._journal = Journal(store, clock, self._pass_on, self._forget_kept, self._call_die)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers = Readers(metrics)
        self._held: dict[Sink, set[str]] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._draining = False
        self._working_since: float | None = None
        self._last_stats = engine.stats()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._journal.start()
        self._thread.start()

    async def stop(self, timeout_s: float = STALL_S) -> bool:
        """Ends the threads after what they are at; False if they did not end in time."""
        self._mailbox.close()
        await asyncio.to_thread(self._thread.join, timeout_s)
        closed = await asyncio.to_thread(self._journal.close, timeout_s)
        self._fail_all(InternalFailure("the server has stopped"))
        return closed and not self._thread.is_alive()

    # Work

    async def submit(self, request: Request, sink: Sink) -> None:
        """Starts a request; its events go to ``sink``. Raises `EngineError`.

        The caller calls `release` with the sink when nobody reads it any more.
        """
        if request.keep or request.session is not None:
            self.check_store()
        tenant = self.tenants.get(request.owner)
        if tenant is not None:
            tenant.check_tokens()
        ids = request.ids
        if any(id in self._readers for id in ids):
            raise InvalidRequest("request_id: is in use by a live request", "request_id")

        def start(engine: EngineLike, now: float) -> None:
            if tenant is not None:
                number = engine.num_running(request.owner) + len(ids)
                tenant.check_room("max_running", number)
            engine.submit(request, now)

        for id in ids:
            span = self._tracer.generation(request, id)
            self._readers.add(id, sink, self._clock(), span)
        try:
            await self.call(start, ids, work=True)
        except EngineError as error:
            for id in ids:
                self._readers.refuse(id, error)
            raise

    def cancel(self, request_id: str) -> None:
        """Asks for the end of a request; its `Finished` event comes through the sink."""
        self._tell(lambda engine, now: engine.cancel(request_id))

    def release(self, sink: Sink) -> None:
        """The reader of ``sink`` is gone: its requests end, but those of kept sessions go on."""
        self._held.pop(sink, None)
        for request_id in self._readers.requests(sink):
            self.detach(request_id)

    def detach(self, request_id: str) -> None:
        """Nobody reads the request any more."""
        self._readers.leave(request_id)
        for held in self._held.values():
            held.discard(request_id)
        self._tell(lambda engine, now: engine.detach(request_id))

    def hold(self, sink: Sink) -> None:
        """Parks the requests of a reader that does not keep up, until `go_on`."""
        held = self._held.setdefault(sink, set())
        new = [id for id in self._readers.keeping_up(sink) if id not in held]
        held.update(new)
        for request_id in new:
            self._tell(lambda engine, now, id=request_id: engine.park(id))  # type: ignore[misc]

    def go_on(self, sink: Sink) -> None:
        """The reader has caught up."""
        for request_id in self._held.pop(sink, ()):
            self._unpark(request_id)

    def _unpark(self, request_id: str) -> None:
        self._tell(lambda engine, now: engine.unpark(request_id))

    async def attach(
        self, session: str, owner: str, request_id: str, sink: Sink, take_over: bool
    ) -> SessionInfo:
        """Makes ``sink`` the reader of what the session runs, which is parked: see the engine.

        The reader is behind until `caught_up`.
        """

        def add_reader(info: SessionInfo) -> None:
            if info.busy:
                self._readers.add(request_id, sink, self._clock(), behind=True)

        try:
            return await self.call(
                lambda engine, now: engine.attach(session, owner, request_id, take_over),
                arrived=add_reader,
                work=True,
            )
        except asyncio.CancelledError:  # the client has left, and `release` knew nothing of it yet
            self.detach(request_id)
            raise

    def caught_up(self, request_id: str) -> None:
        """The reader of an attached request has all that it had missed: the request goes on."""
        found = self._readers.caught_up(request_id)
        if found is None:
            return
        sink, held_back = found
        batches: dict[Sink, list[Event]] = {}
        self._readers.sort(held_back, self._clock(), batches)
        self._put(batches)
        if sink in self._held:
            self._held[sink].add(request_id)
        else:
            self._unpark(request_id)

    async def stats(self) -> EngineStats:
        """The engine's counts; the last known ones where it does not answer any more."""
        self.metrics.store_works = self._journal.error is None
        if self.healthy:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(STALL_S):
                    self._last_stats = await self.call(lambda engine, now: engine.stats())
        return self._last_stats

    async def call(
        self,
        call: Callable[[EngineLike, float], R],
        request_ids: tuple[str, ...] = (),
        arrived: Callable[[R], None] | None = None,
        work: bool = False,
    ) -> R:
        """Runs ``call`` in the engine's thread; what it has changed is safe when it returns.

        ``work`` is refused while the server drains.
        """
        if work and self._draining:
            raise Draining
        if self.died.is_set():
            raise InternalFailure("the engine has stopped")
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if not self._mailbox.post(_Command(call, future, request_ids, arrived)):
            raise QueueFull("too many commands wait for the engine")
        self._calls.add(future)
        try:
            return await future
        finally:
            self._calls.discard(future)

    async def ask_store(self, ask: Callable[[Store], R]) -> R:
        """An answer of the store, after all that has been done before. Raises `EngineError`.

        A full store still answers: what it has can be read, and room can be made.
        """
        if not isinstance(self._journal.error, StoreFull):
            self.check_store()
        return await asyncio.wrap_future(self._journal.ask(ask))

    def check_store(self) -> None:
        """Raises why kept sessions cannot go on, if they cannot."""
        if self._journal.error is not None:
            raise self._journal.error

    def epoch_name(self, epoch: int) -> str:
        """What a client calls an epoch: one of another store is never the same."""
        return f"{self._journal.store_id}-{epoch}"

    def _tell(self, call: Callable[[EngineLike, float], object]) -> None:
        """A command that gives something back: it is never refused."""
        self._mailbox.post(_Command(call, None), urgent=True)

    # Life

    @property
    def healthy(self) -> bool:
        """Whether both threads live and neither has been at one thing for `STALL_S`."""
        now = self._clock()
        stalled = any(
            since is not None and now - since > STALL_S
            for since in (self._working_since, self._journal.working_since)
        )
        return self._thread.is_alive() and not self.died.is_set() and not stalled

    @property
    def ready(self) -> bool:
        return self.healthy and not self._draining and self._journal.error is None

    @property
    def takes_sockets(self) -> bool:
        """Whether a new socket is of use, be it for what nobody keeps."""
        return self.healthy and not self._draining

    def begin_drain(self) -> None:
        """Refuses new work from here on; what runs goes on."""
        self._draining = True

    async def retire(self) -> None:
        """Saves all kept sessions, and tells the readers of those that run where they stand."""
        with contextlib.suppress(EngineError):
            while await self.call(lambda engine, now: engine.retire(RETIRED_AT_ONCE)):
                pass

    async def drained(self) -> None:
        """Returns when no request has a reader."""
        await self._readers.idle.wait()

    def cancel_all(self) -> None:
        for request_id in self._readers.requests():
            self.cancel(request_id)

    # The event loop's side

    def _deliver(self) -> None:
        """Runs in the event loop, for all steps that wait: each reader gets its events at once."""
        self._awaits_delivery = False  # before the look at the steps: see `_pass_on`
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        if not steps:
            return
        self._undelivered.release(len(steps))
        batches: dict[Sink, list[Event]] = {}
        for step in steps:
            if step.lost is not None:
                _lose(step)
            for command in step.commands:
                self._answer(command)
            self._readers.sort(step.events, step.done_s, batches)
            for owner, num_tokens in step.usage.items():
                if (tenant := self.tenants.get(owner)) is not None:
                    tenant.spend(num_tokens)
            if step.prefixes:
                self.on_evicted_prefixes(step.prefixes)
        self._put(batches)

    def _put(self, batches: dict[Sink, list[Event]]) -> None:
        for sink, events in batches.items():
            if not sink.put(events):
                self.release(sink)

    def _answer(self, command: _Command) -> None:
        if command.error is not None:
            for request_id in command.request_ids:
                self._readers.refuse(request_id, command.error)
        elif command.arrived is not None and command.future and not command.future.cancelled():
            command.arrived(command.result)
        if command.future is None or command.future.done():
            return
        if command.error is not None:
            command.future.set_exception(command.error)
        else:
            command.future.set_result(command.result)

    def _call_die(self) -> None:
        """From a thread that cannot go on."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(self._die)

    def _die(self) -> None:
        self.died.set()
        self._mailbox.close()
        self._fail_all(InternalFailure("the engine has stopped"))

    def _fail_all(self, error: EngineError) -> None:
        for future in list(self._calls):
            if not future.done():
                future.set_exception(error)
        self._readers.fail_all(error)

    # The engine's thread

    def _run(self) -> None:
        try:
            while (commands := self._mailbox.take(self._patience_s())) is not None:
                self._turn(commands)
        except BaseException:  # whatever it is, the thread is no more
            logger.exception("the engine failed")
            self._call_die()

    def _patience_s(self) -> float | None:
        """How long the thread may sleep if no command comes: for ever, unless there is work."""
        if self._engine.has_work():
            return 0.0
        expiry = self._engine.next_expiry()
        return None if expiry is None else max(0.0, expiry - self._clock())

    def _turn(self, commands: list[_Command]) -> None:
        now = self._working_since = self._clock()
        step = self._new_step()
        for command in commands:
            if command.generation is not None:
                self._hand_in(step)
                self._generation = command.generation
                step = self._new_step()
            self._execute(command, now)
            step.commands.append(command)
            if made := self._engine.take_records():
                command.logged = True
                step.records += made
        step.events = self._engine.step(now)
        step.records += self._engine.take_records()
        step.prefixes = self._engine.take_evicted_prefixes()
        step.usage = self._engine.take_usage()
        self._working_since = None
        self._hand_in(step)

    def _new_step(self) -> _Step:
        return _Step([], [], self._engine.take_records(), self._generation, self._clock())

    def _hand_in(self, step: _Step) -> None:
        if step.commands or step.events or step.records or step.prefixes or step.usage:
            self._undelivered.acquire()
            step.done_s = self._clock()
            self._journal.add(step)

    def _execute(self, command: _Command, now: float) -> None:
        try:
            command.result = command.call(self._engine, now)
        except EngineError as error:
            command.error = error
        except Exception:
            logger.exception("a command failed")
            command.error = InternalFailure("the engine could not do this")

    # The journal's thread, or the engine's where nothing has to be logged

    def _pass_on(self, step: _Step) -> None:
        assert self._loop is not None
        self._steps.append(step)
        if not self._awaits_delivery:  # else the delivery that is due finds this step too
            self._awaits_delivery = True
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                self._loop.call_soon_threadsafe(self._deliver)

    def _forget_kept(self, generation: int, error: EngineError) -> None:
        command = _Command(lambda engine, now: engine.discard_kept(error), None)
        command.generation = generation
        self._mailbox.post(command, urgent=True)


def _lose(step: _Step) -> None:
    """Takes out of a step what has not been logged: nobody may see it."""
    assert step.lost is not None
    for command in step.commands:
        if command.logged and command.error is None:
            command.error = step.lost
    lost = {_request_id(entry) for _, entry in step.records}
    step.events = [event for event in step.events if event.request_id not in lost]


def _request_id(entry: object) -> str | None:
    if isinstance(entry, TokenEvent | Finished):
        return entry.request_id
    return entry.request.request_id if isinstance(entry, Accepted) else None
