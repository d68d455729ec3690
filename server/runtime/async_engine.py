"""What the event loop has of an engine: commands go in, what each step made comes out.

A command goes through the command queue to the engine thread (`engine_thread`). What a step
made goes through the store queue to the store thread (`store_thread`), which makes safe what
must be, and through the delivery queue back to the event loop, which gives each reader its
events. The engine waits for no client (`request_registry`); it does wait for the event loop
and the disk where these are behind (`delivery_queue`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from model.memory import return_freed_memory
from server.engine.engine import Engine
from server.engine.prefixes import Evicted
from server.engine.types import EngineStats, Event
from server.errors import InternalFailure, QueueFull, RequestError
from server.observability.metrics import Metrics
from server.observability.tracing import OFF, Tracer
from server.runtime.commands import Call, Command, TenantAccount, evict
from server.runtime.queues import CommandQueue, DeliveryQueue, EngineStep, StoreQueue
from server.runtime.readers import Followers, RequestRegistry, Sink
from server.runtime.threads import EngineThread, StoreThread
from server.store.base import Fenced, Store, StoreFull

logger = logging.getLogger("everstream.async_engine")

STALL_S = 5.0
MAX_COMMANDS = 4096
#: When requests that took so much have ended, that memory is returned to the system: after a
#: while, in which their answers end as well.
FREED_BYTES, FREED_S = 16 << 20, 1.0

R = TypeVar("R")


class Draining(RequestError):
    """The server is about to stop and takes no new work."""

    code = "draining"
    message = "the server is draining; try another one"


class AsyncEngine:
    """Asynchronous access to an engine. All methods belong to one event loop.

    Call `start` before and `stop` after use. ``died`` is set when the engine's or
    the store's thread ended by an error; it never recovers. ``requests`` are those that
    have a reader; ``followers`` read the logs of sessions and are no one's readers.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
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
        self._clock = clock
        self._last_stats = engine.stats()
        self._command_queue: CommandQueue[Command] = CommandQueue(MAX_COMMANDS)
        self._store_queue = StoreQueue()
        self._delivery = DeliveryQueue(self._deliver, self._die)
        queues = self._store_queue, self._command_queue, self._delivery
        self._store_thread = StoreThread(store, clock, *queues)
        self._thread = EngineThread(engine, clock, *queues)
        self.requests = RequestRegistry(metrics, clock, self._command_queue, tracer)
        self.followers = Followers(lambda: self.tenants)
        self._calls: set[asyncio.Future[Any]] = set()
        #: Why new work is refused, where it is.
        self._refusal: Callable[[], RequestError] | None = None
        self._retirement: Callable[[], RequestError] | None = None
        self._freed_bytes = 0
        self._returning: asyncio.TimerHandle | None = None
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        self._delivery.open(asyncio.get_running_loop())
        self._store_thread.start()
        self._thread.start()

    async def stop(self, timeout_s: float = STALL_S) -> bool:
        """Ends the threads after what they are at; False if they did not end in time."""
        self._command_queue.close()
        ended = await asyncio.to_thread(self._thread.join, timeout_s)
        closed = await asyncio.to_thread(self._store_thread.close, timeout_s)
        self._fail_all(InternalFailure("the server has stopped"))
        return closed and ended

    # Work

    async def call(
        self,
        call: Call[R],
        *,
        request_ids: tuple[str, ...] = (),
        arrived: Callable[[Any], None] | None = None,
        session: str | None = None,
        work: bool = False,
        urgent: bool = False,
    ) -> R:
        """Runs ``call`` in the engine's thread; what it has changed is safe when it returns.

        So is what it has seen of its ``session``.
        ``work`` is refused while the server drains; what is ``urgent`` is taken also where
        too many commands wait. For the others see `Command`.
        """
        if work and self._refusal is not None:
            raise self._refusal()
        if self.died.is_set():
            raise self._end()
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        command = Command(call, future, request_ids, arrived)
        if session is not None:
            command.logged = frozenset((session,))
        if not self._command_queue.post(command, urgent=urgent):
            raise QueueFull("too many commands wait for the engine")
        self._calls.add(future)
        try:
            return await future
        finally:
            self._calls.discard(future)

    def tell(self, call: Call[object]) -> None:
        """Runs ``call`` in the engine's thread some time, unless the server drains by now."""
        if self._refusal is None:
            self._command_queue.post(Command(call), urgent=True)

    async def stats(self) -> EngineStats:
        """The engine's counts; the last known ones where it does not answer any more."""
        if self.healthy:
            with contextlib.suppress(RequestError, TimeoutError):
                async with asyncio.timeout(STALL_S):
                    self._last_stats = await self.call(lambda engine, now: engine.stats())
        return self._last_stats

    @property
    def store_works(self) -> bool:
        """Whether kept sessions can continue."""
        return self._store_thread.error is None

    @property
    def generation(self) -> int:
        """Grows whenever the engine has to discard all its kept sessions."""
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
        return await asyncio.wrap_future(self._store_queue.ask(ask))

    def check_store(self) -> None:
        """Raises why kept sessions cannot continue, if they cannot."""
        if self._store_thread.error is not None:
            raise self._store_thread.error

    def epoch_name(self, epoch: int) -> str:
        """What a client calls an epoch: one of another store is never the same."""
        return f"{self._store_thread.store_id}-{epoch}"

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
        """Refuses new work from here on; what runs continues."""
        self._refusal = Draining
        self.followers.end()

    def begin_retirement(self, refusal: Callable[[], RequestError]) -> None:
        """Refuses new work on sessions: see `check_retirement`.

        What runs continues and may still be read again, and requests of those who use the
        async engine by now are still taken.
        """
        self._retirement = refusal
        self.followers.end()

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
        ends = (self._unused, self.requests.idle, self._idle)
        while not all(end.is_set() for end in ends):
            for end in ends:
                await end.wait()

    async def retire(self) -> None:
        """Saves all kept sessions, and tells the readers of those that run where they stand."""
        with contextlib.suppress(RequestError):
            await self.evict(sys.maxsize)

    async def evict(self, max_sessions: int) -> int:
        """Saves at most so many kept sessions, as `retire` does all; returns how many."""
        num_left = max_sessions
        while num_left and (num_evicted := await self.call(evict(num_left))):
            num_left -= num_evicted
        return max_sessions - num_left

    async def drained(self) -> None:
        """Returns when no request has a reader."""
        await self.requests.idle.wait()

    # Delivery

    def _deliver(self) -> None:
        """For all steps that wait: each reader gets its events at once."""
        steps = self._delivery.take()
        if not steps:
            return
        (self._idle.set if steps[-1].is_idle else self._idle.clear)()
        batches: dict[Sink, list[Event]] = {}
        for step in steps:
            if step.lost:
                step.lose()
            for command in step.commands:
                self.requests.note(command)
                if command.future is None or command.future.done():
                    continue
                if command.error is not None:
                    command.future.set_exception(command.error)
                else:
                    command.future.set_result(command.result)
            self.requests.sort(step.events, step.done_s, batches)
            self.followers.note(step.records)
            self._account(step)
            if step.prefixes:
                self.on_evicted_prefixes(step.prefixes)
        for sink, events in batches.items():
            if not _put(sink, events):
                self.requests.release(sink)

    def _account(self, step: EngineStep) -> None:
        """What tenants have used, and what their requests have freed."""
        for owner, num_tokens in step.usage.items():
            if (tenant := self.tenants.get(owner)) is not None:
                tenant.spend(num_tokens)
        self._freed_bytes += step.freed_bytes
        if self._freed_bytes >= FREED_BYTES and self._returning is None:
            self._returning = asyncio.get_running_loop().call_later(FREED_S, self._return_memory)

    def _return_memory(self) -> None:
        """What large requests have taken."""
        self._returning, self._freed_bytes = None, 0
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)

    def _die(self) -> None:
        """A thread cannot continue."""
        self.died.set()
        self._command_queue.close()
        self._idle.set()
        self._fail_all(self._end())

    def _end(self) -> RequestError:
        """Why nothing continues: another process has what this one had, or it is broken."""
        error = self._store_thread.error
        return error if isinstance(error, Fenced) else InternalFailure("the engine has stopped")

    def _fail_all(self, error: RequestError) -> None:
        for future in list(self._calls):
            if not future.done():
                future.set_exception(error)
        self.requests.fail_all(error)


def _put(sink: Sink, events: list[Event]) -> bool:
    """False where the reader does not keep up, or what encodes its events fails."""
    try:
        return sink.put(events)
    except Exception:  # the other readers get their events all the same
        logger.exception("events could not be delivered")
        sink.fail(InternalFailure("the server could not deliver this"))
        return False
