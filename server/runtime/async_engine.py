"""One thread owns the engine: commands go in, events come out, in batches of one step.

The event loop posts commands to a bounded command queue and is woken once per step for
all that the step made, or once for several steps where it is behind. A step goes from
`EngineThread` to `StoreThread.add`, which makes safe what must be, then to
`AsyncEngine._deliver_soon` and in the event loop to `_deliver`. The engine waits for no client:
what a reader does not take parks, and one that leaves a kept session is detached
from it. The engine does wait for the event loop and the disk, when these are
`MAX_UNDELIVERED` steps behind: a slow server is not a reason to cut off its readers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from server.engine.prefix_cache import Evicted
from server.engine.types import EngineStats, Event, Request, SessionInfo
from server.engine.value import SessionValue
from server.errors import InternalFailure, InvalidRequest, QueueFull, RequestError
from server.observability.metrics import Metrics
from server.observability.tracing import OFF, Tracer
from server.runtime.arrival import Absent, Arrival, restore
from server.runtime.engine_thread import Clock, Command, EngineLike, EngineStep, EngineThread
from server.runtime.request_registry import RequestRegistry, Sink
from server.runtime.store_thread import StoreThread
from server.runtime.tenant import TenantAccount
from server.store.base import Store
from server.store.errors import Fenced, StoreFull

STALL_S = 5.0
#: Sessions whose states are copied before the store has written them.
RETIRED_AT_ONCE = 32

R = TypeVar("R")


class Draining(RequestError):
    """The server is about to stop and takes no new work."""

    code = "draining"

    def __init__(self) -> None:
        super().__init__("the server is draining; try another one")


class AsyncEngine:
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
        self.tenants: Mapping[str, TenantAccount] = {}
        self.died = asyncio.Event()
        self.durable = store.durable
        self.on_evicted_prefixes: Callable[[list[Evicted]], None] = lambda evicted: None
        self._tracer = tracer
        self._clock = clock
        self._steps: deque[EngineStep] = deque()
        self._is_delivery_due = False
        self._last_stats = engine.stats()
        self._store_thread = StoreThread(
            store, clock, self._deliver_soon, self._forget_kept, self._call_die
        )
        self._thread = EngineThread(engine, clock, self._store_thread, self._call_die)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests = RequestRegistry(metrics)
        self._held: dict[Sink, set[str]] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        #: Why new work is refused, where it is.
        self._refusal: Callable[[], RequestError] | None = None
        self._retirement: Callable[[], RequestError] | None = None
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._store_thread.start()
        self._thread.start()

    async def stop(self, timeout_s: float = STALL_S) -> bool:
        """Ends the threads after what they are at; False if they did not end in time."""
        self._thread.close()
        ended = await asyncio.to_thread(self._thread.join, timeout_s)
        closed = await asyncio.to_thread(self._store_thread.close, timeout_s)
        self._fail_all(InternalFailure("the server has stopped"))
        return closed and ended

    # Work

    async def submit(
        self,
        request: Request,
        sink: Sink,
        start: SessionValue | None = None,
        arrival: Arrival | None = None,
    ) -> Absent | None:
        """Starts a request; its events go to ``sink``. Raises `RequestError`.

        A new session begins as ``start`` says, and else empty; for any other see `call_on`.
        The caller calls `release` with the sink when it has no reader any more.
        """
        if request.keep or request.session is not None:
            self.check_store()
        tenant = self.tenants.get(request.owner)
        if tenant is not None:
            tenant.check_tokens()
        ids = request.ids
        if any(id in self._requests for id in ids):
            raise InvalidRequest("request_id: is in use by a live request", "request_id")

        def begin(engine: EngineLike, now: float) -> None:
            self.check_running(engine, request.owner, len(ids))
            engine.submit(request, now, start)

        for id in ids:
            span = self._tracer.generation(request, id)
            self._requests.add(id, sink, self._clock(), span)
        try:
            if request.session is None:
                return await self.call(begin, ids, work=True)
            session, owner = request.session, request.owner
            found = await self.call_on(session, owner, begin, arrival, request_ids=ids, work=True)
        except RequestError as error:
            for id in ids:
                self._requests.refuse(id, error)
            raise
        if isinstance(found, Absent):
            for id in ids:
                self._requests.forget(id)
        return found

    def check_running(self, engine: EngineLike, owner: str, num_more: int) -> None:
        """On the engine thread. Raises `RequestError` where the owner may not run so many more."""
        if num_more and (tenant := self.tenants.get(owner)) is not None:
            tenant.check_room("max_running", engine.num_running(owner) + num_more)

    def cancel(self, request_id: str) -> None:
        """Asks for the end of a request; its `Finished` event comes through the sink."""
        self._tell(lambda engine, now: engine.cancel(request_id))

    def release(self, sink: Sink) -> None:
        """The reader of ``sink`` is gone: its requests end, but those of kept sessions go on."""
        self._held.pop(sink, None)
        for request_id in self._requests.requests(sink):
            self.detach(request_id)

    def detach(self, request_id: str) -> None:
        """The request has no reader any more."""
        self._requests.leave(request_id)
        for held in self._held.values():
            held.discard(request_id)
        self._tell(lambda engine, now: engine.detach(request_id))

    def hold(self, sink: Sink) -> None:
        """Parks the requests of a reader that does not keep up, until `go_on`."""
        held = self._held.setdefault(sink, set())
        new = [id for id in self._requests.keeping_up(sink) if id not in held]
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
        self,
        session: str,
        owner: str,
        request_id: str,
        sink: Sink,
        take_over: bool,
        arrival: Arrival | None = None,
    ) -> SessionInfo | Absent:
        """Makes ``sink`` the reader of what the session runs, which is parked: see the engine.

        The reader is behind until `caught_up`. For ``arrival`` see `call_on`.
        """
        is_attached = False

        def add_reader(info: SessionInfo | Absent) -> None:
            if not isinstance(info, Absent) and info.busy:
                self._requests.add(request_id, sink, self._clock(), behind=True)

        def attach(engine: EngineLike, now: float) -> SessionInfo:
            nonlocal is_attached
            self.check_running(engine, owner, engine.num_starting(session, owner))
            info = engine.attach(session, owner, request_id, take_over)
            is_attached = True
            return info

        try:
            return await self.call_on(
                session, owner, attach, arrival, arrived=add_reader, work=True
            )
        except asyncio.CancelledError:  # the client has left, and `release` knew nothing of it yet
            self.detach(request_id)
            raise
        except RequestError:
            if is_attached:  # and what was recorded with it is lost
                self.detach(request_id)
            raise

    def caught_up(self, request_id: str) -> None:
        """The reader of an attached request has all that it had missed: the request goes on."""
        found = self._requests.caught_up(request_id)
        if found is None:
            return
        sink, held_back = found
        batches: dict[Sink, list[Event]] = {}
        self._requests.sort(held_back, self._clock(), batches)
        self._put(batches)
        if sink in self._held:
            self._held[sink].add(request_id)
        else:
            self._unpark(request_id)

    async def stats(self) -> EngineStats:
        """The engine's counts; the last known ones where it does not answer any more."""
        if self.healthy:
            with contextlib.suppress(RequestError, TimeoutError):
                async with asyncio.timeout(STALL_S):
                    self._last_stats = await self.call(lambda engine, now: engine.stats())
        return self._last_stats

    async def call(
        self,
        call: Callable[[EngineLike, float], R],
        request_ids: tuple[str, ...] = (),
        arrived: Callable[[R], None] | None = None,
        work: bool = False,
        urgent: bool = False,
    ) -> R:
        """Runs ``call`` in the engine's thread; what it has changed is safe when it returns.

        ``work`` is refused while the server drains; what is ``urgent`` is taken also where
        too many commands wait.
        """
        if work and self._refusal is not None:
            raise self._refusal()
        if self.died.is_set():
            raise self._end()
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if not self._thread.post(Command(call, future, request_ids, arrived), urgent=urgent):
            raise QueueFull("too many commands wait for the engine")
        self._calls.add(future)
        try:
            return await future
        finally:
            self._calls.discard(future)

    async def call_on(
        self,
        session: str,
        owner: str,
        call: Callable[[EngineLike, float], R],
        arrival: Arrival | None = None,
        *,
        request_ids: tuple[str, ...] = (),
        arrived: Callable[[R | Absent], None] | None = None,
        work: bool = False,
    ) -> R | Absent:
        """As `call`, for one kept session: `Absent` where the engine does not have it.

        With an ``arrival`` the engine restores the session first, in the same command.
        """

        def on_session(engine: EngineLike, now: float) -> R | Absent:
            engine.expire(now)
            if arrival is not None:
                restore(engine, now, arrival, self.generation)
            elif not engine.has_session(session, owner):
                return Absent.ABSENT
            return call(engine, now)

        work = work or arrival is not None
        return await self.call(on_session, request_ids, arrived, work)

    def restore(self, arrival: Arrival) -> None:
        """Restores a session for which no command waits any more."""
        if self._refusal is None:
            self._tell(lambda engine, now: restore(engine, now, arrival, self.generation))

    @property
    def store_works(self) -> bool:
        """Whether kept sessions can go on."""
        return self._store_thread.error is None

    @property
    def generation(self) -> int:
        """Grows whenever the engine is told to forget all that it has of kept sessions."""
        return self._store_thread.generation

    async def settled(self) -> None:
        """Returns when all that was asked of the engine before is safe, or has failed."""
        with contextlib.suppress(RequestError):  # it has died
            await self.call(lambda engine, now: None, urgent=True)

    async def ask_store(self, ask: Callable[[Store], R], *, always: bool = False) -> R:
        """An answer of the store, after all that has been done before. Raises `RequestError`.

        A full store still answers: what it has can be read, and room can be made. One
        that has failed is asked only where it ``always`` must hear of it.
        """
        if not always and not isinstance(self._store_thread.error, StoreFull):
            self.check_store()
        return await asyncio.wrap_future(self._store_thread.ask(ask))

    def check_store(self) -> None:
        """Raises why kept sessions cannot go on, if they cannot."""
        if self._store_thread.error is not None:
            raise self._store_thread.error

    def epoch_name(self, epoch: int) -> str:
        """What a client calls an epoch: one of another store is never the same."""
        return f"{self._store_thread.store_id}-{epoch}"

    def _tell(self, call: Callable[[EngineLike, float], object]) -> None:
        """A command that gives something back: it is never refused."""
        self._thread.post(Command(call, None), urgent=True)

    # Life

    @property
    def healthy(self) -> bool:
        """Whether both threads live and neither has been at one thing for `STALL_S`."""
        now = self._clock()
        stalled = any(
            since is not None and now - since > STALL_S
            for since in (self._thread.working_since, self._store_thread.working_since)
        )
        return self._thread.alive and not self.died.is_set() and not stalled

    @property
    def ready(self) -> bool:
        return self.healthy and self._refusal is None and self.store_works

    @property
    def takes_sockets(self) -> bool:
        """Whether a new socket is of use, be it for what is not kept."""
        return self.healthy and self._refusal is None

    def begin_drain(self) -> None:
        """Refuses new work from here on; what runs goes on."""
        self._refusal = Draining

    def begin_retirement(self, refusal: Callable[[], RequestError]) -> None:
        """Refuses new work on sessions: see `check_retirement`.

        What runs goes on and may still be read again, and requests of those who use the
        async engine by now are still taken.
        """
        self._retirement = refusal

    def check_retirement(self) -> None:
        """Raises the error that refuses new work on sessions, if there is one."""
        if self._retirement is not None:
            raise self._retirement()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Held by those who may still ask for work."""
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def finished(self) -> None:
        """Returns when it has no user, and nothing runs any more, whether it is read or not."""
        ends = (self._unused, self._requests.idle, self._idle)
        while not all(end.is_set() for end in ends):
            for end in ends:
                await end.wait()

    async def retire(self) -> None:
        """Saves all kept sessions, and tells the readers of those that run where they stand."""
        with contextlib.suppress(RequestError):
            while await self.call(lambda engine, now: engine.retire(RETIRED_AT_ONCE)):
                pass

    async def evict(self, max_sessions: int) -> int:
        """Saves at most so many kept sessions, as `retire` does all; returns how many."""

        def evict(engine: EngineLike, now: float) -> int:
            return engine.retire(0) - engine.retire(min(max_sessions - moved, RETIRED_AT_ONCE))

        moved = 0
        while moved < max_sessions and (number := await self.call(evict)):
            moved += number
        return moved

    async def drained(self) -> None:
        """Returns when no request has a reader."""
        await self._requests.idle.wait()

    def cancel_all(self) -> None:
        for request_id in self._requests.requests():
            self.cancel(request_id)

    # On the event loop

    def _deliver(self) -> None:
        """Runs in the event loop, for all steps that wait: each reader gets its events at once."""
        self._is_delivery_due = False  # before the look at the steps: see `_deliver_soon`
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        if not steps:
            return
        self._thread.delivered(len(steps))
        (self._idle.set if steps[-1].is_idle else self._idle.clear)()
        batches: dict[Sink, list[Event]] = {}
        for step in steps:
            if step.lost:
                step.lose()
            for command in step.commands:
                self._answer(command)
            self._requests.sort(step.events, step.done_s, batches)
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

    def _answer(self, command: Command) -> None:
        if command.error is not None:
            for request_id in command.request_ids:
                self._requests.refuse(request_id, command.error)
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
        self._thread.close()
        self._idle.set()
        self._fail_all(self._end())

    def _end(self) -> RequestError:
        """Why nothing goes on: another process has what this one had, or it is broken."""
        error = self._store_thread.error
        return error if isinstance(error, Fenced) else InternalFailure("the engine has stopped")

    def _fail_all(self, error: RequestError) -> None:
        for future in list(self._calls):
            if not future.done():
                future.set_exception(error)
        self._requests.fail_all(error)

    # On the store thread, or on the engine thread where a step has nothing to log

    def _deliver_soon(self, step: EngineStep) -> None:
        """Has the event loop deliver the step, with all that wait by then."""
        assert self._loop is not None
        self._steps.append(step)
        if not self._is_delivery_due:  # else the delivery that is due finds this step too
            self._is_delivery_due = True
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                self._loop.call_soon_threadsafe(self._deliver)

    def _forget_kept(
        self, generation: int, error: RequestError, session: str | None = None
    ) -> None:
        command = Command(lambda engine, now: engine.discard_kept(error, session), None)
        command.generation = generation
        self._thread.post(command, urgent=True)
