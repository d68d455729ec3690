"""Who reads: live requests with the readers of their events, and followers of logs."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from server.engine.session import Record
from server.engine.types import Event, Failed, Finished, Migrated, Request, TokenEvent
from server.errors import InvalidRequest, RequestError
from server.observability.metrics import Metrics
from server.observability.tracing import NO_SPAN, OFF, GenerationSpan, Tracer
from server.runtime import commands
from server.runtime.commands import Absent, Command, TenantAccount
from server.runtime.queues import CommandQueue

# -------------------------------------------------------------------------------------------------
# The live requests of a server: who reads the events of each, and how long its tokens took.
#
# What a reader does reaches the engine by a command that is never refused. The engine waits
# for no reader: what one does not take parks, and one that leaves a kept session is detached.


class Sink(Protocol):
    """Where the events of a request go: a `server.runtime.queues.EventQueue`."""

    def put(self, items: Sequence[Event], /) -> bool: ...
    def fail(self, error: RequestError, /) -> None: ...


@dataclass(slots=True)
class _Live:
    """A request that has not finished: its reader and the times of its latencies.

    ``held_back`` are the events of one whose reader is behind, None for any other.
    """

    sink: Sink
    submitted_s: float
    generation: GenerationSpan
    held_back: list[Event] | None = None
    ttft_s: float | None = None
    last_token_s: float | None = None


class RequestRegistry:
    """Belongs to the event loop. ``idle`` is set while no request is live."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float],
        command_queue: CommandQueue[Command],
        tracer: Tracer = OFF,
    ) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._metrics, self._clock, self._tracer = metrics, clock, tracer
        self._command_queue = command_queue
        self._live: dict[str, _Live] = {}
        #: The parked requests of readers that do not keep up.
        self._held: dict[Sink, set[str]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    # What the server does

    @contextlib.contextmanager
    def accepting(self, request: Request, sink: Sink) -> Iterator[None]:
        """Makes ``sink`` the reader of a request, unless the submission in the body is refused.

        The caller calls `release` with the sink when it has no reader any more.
        """
        if any(id in self for id in request.ids):
            raise InvalidRequest("request_id: is in use by a live request", "request_id")
        for id in request.ids:
            self.add(id, sink, self._tracer.generation(request, id))
        try:
            yield
        except RequestError as error:
            for id in request.ids:
                self.refuse(id, error)
            raise

    def add(
        self,
        request_id: str,
        sink: Sink,
        generation: GenerationSpan = NO_SPAN,
        behind: bool = False,
    ) -> None:
        """With ``behind``, events are held back until `caught_up`."""
        self._live[request_id] = _Live(sink, self._clock(), generation, [] if behind else None)
        self.idle.clear()

    def refuse(self, request_id: str, error: RequestError) -> None:
        """Takes a request out that was not accepted."""
        if (live := self._live.get(request_id)) is not None:
            live.generation.failed(error)
            self._forget(request_id)

    def note(self, command: Command) -> None:
        """Has the requests as ``command`` left them. Comes before the events of its step."""
        is_awaited = command.future is not None and not command.future.cancelled()
        if command.error is not None:
            for request_id in command.request_ids:
                self.refuse(request_id, command.error)
        elif command.result is not Absent.ABSENT:
            if is_awaited and command.arrived is not None:
                command.arrived(command.result)
            for request_id in command.request_ids:
                self._tell_again(request_id)

    def _tell_again(self, request_id: str) -> None:
        """Tells the engine again what it was told of the request while its session was loaded."""
        live = self._live.get(request_id)
        if live is None:
            self._command_queue.post(commands.detach(request_id), urgent=True)
        elif request_id in self._held.get(live.sink, ()):
            self._command_queue.post(commands.park(request_id), urgent=True)

    def requests(self, sink: Sink | None = None) -> list[str]:
        """The ids of the live requests that ``sink`` reads, or of all."""
        return [id for id, live in self._live.items() if sink is None or live.sink is sink]

    def fail_all(self, error: RequestError) -> None:
        """Lets every reader see ``error``; no request is live after it."""
        for live in self._live.values():
            live.sink.fail(error)
            live.generation.failed(error)
        self._live.clear()
        self.idle.set()

    def sort(self, events: list[Event], now: float, batches: dict[Sink, list[Event]]) -> None:
        """Adds the events of a step done at ``now`` to their readers' batches, and counts them.

        Where a request has got several tokens, each has its part of the time since the last one.
        """
        bursts: dict[str, tuple[float, int]] = {}  # when the last token came, and tokens since
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                if type(event) is Finished:  # without a reader, or by its leaving
                    self._metrics.request_finished(event)
                continue
            if live.held_back is not None:
                live.held_back.append(event)
                continue
            if type(event) is TokenEvent:
                if live.last_token_s is None:
                    live.ttft_s = now - live.submitted_s
                    self._metrics.ttft.observe(live.ttft_s)
                else:
                    since_s, num_tokens = bursts.get(event.request_id, (live.last_token_s, 0))
                    bursts[event.request_id] = since_s, num_tokens + 1
                live.last_token_s = now
            elif type(event) is Finished:
                self._metrics.request_finished(event)
                live.generation.finished(event, live.ttft_s)
                self._forget(event.request_id)
            elif type(event) is Failed:
                self.refuse(event.request_id, event.error)
            elif type(event) is Migrated:
                live.generation.left("migrated")
                self._forget(event.request_id)
            if (batch := batches.get(live.sink)) is None:
                batches[live.sink] = [event]
            else:
                batch.append(event)
        self._observe_gaps(bursts.values(), now)

    def _observe_gaps(self, bursts: Iterable[tuple[float, int]], now: float) -> None:
        gaps: dict[float, int] = {}  # few values: most tokens follow one of the last step
        for since_s, num_tokens in bursts:
            gap = (now - since_s) / num_tokens
            gaps[gap] = gaps.get(gap, 0) + num_tokens
        for gap, count in gaps.items():
            self._metrics.inter_token.observe(gap, count)

    # What readers do

    def cancel(self, request_id: str) -> None:
        """Asks for the end of a request; its `Finished` event comes to its reader."""
        self._command_queue.post(commands.cancel(request_id), urgent=True)

    def cancel_all(self) -> None:
        for request_id in self.requests():
            self.cancel(request_id)

    def release(self, sink: Sink) -> None:
        """The reader of ``sink`` is gone: its requests end, but those of kept sessions continue."""
        self._held.pop(sink, None)
        for request_id in self.requests(sink):
            self.detach(request_id)

    def detach(self, request_id: str) -> None:
        """The request has no reader any more; its later events are dropped."""
        if (live := self._live.get(request_id)) is not None:
            live.generation.left("detached")
            for event in live.held_back or ():
                if isinstance(event, Finished):
                    self._metrics.request_finished(event)
            self._forget(request_id)
        for held in self._held.values():
            held.discard(request_id)
        self._command_queue.post(commands.detach(request_id), urgent=True)

    def hold(self, sink: Sink) -> None:
        """Parks the requests of a reader that does not keep up, until `unhold`."""
        held = self._held.setdefault(sink, set())
        for request_id in self.requests(sink):
            if request_id not in held and self._live[request_id].held_back is None:
                held.add(request_id)
                self._command_queue.post(commands.park(request_id), urgent=True)

    def unhold(self, sink: Sink) -> None:
        """The reader has caught up."""
        for request_id in self._held.pop(sink, ()):
            self._command_queue.post(commands.unpark(request_id), urgent=True)

    def caught_up(self, request_id: str) -> None:
        """The reader of an attached request has all that it had missed: the request continues."""
        live = self._live.get(request_id)
        if live is None or live.held_back is None:
            return
        sink, events, live.held_back = live.sink, live.held_back, None
        batches: dict[Sink, list[Event]] = {}
        self.sort(events, self._clock(), batches)
        if events and not sink.put(batches[sink]):
            self.release(sink)
        if sink in self._held:
            self._held[sink].add(request_id)
        else:
            self._command_queue.post(commands.unpark(request_id), urgent=True)

    def _forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        if not self._live:
            self.idle.set()


# -------------------------------------------------------------------------------------------------
# Those who follow the logs of sessions without being their readers: woken, and given nothing.
#
# A follower reads the log itself when it is woken, at its own pace: no events are queued for it.
# What one has read is there for all who follow the session, until they are woken again. The more
# followers an owner has, the less often each is woken, so that all of them take little from others.


#: Those of a tenant whose ``max_running`` is not limited.
MAX_FOLLOWERS = 256
#: For each of an owner's followers, between two times that one is woken.
WAKE_S = 0.0005
#: Reads of one session that are kept: followers that have caught up ask for the same.
MAX_READS = 4

R = TypeVar("R")


class TooManyFollowers(RequestError):
    """The tenant follows as many sessions as it may."""

    code = "too_many_followers"

    def __init__(self, bound: int) -> None:
        super().__init__(f"this key's tenant has {bound} waiting readers of streams already")


class _Followed:
    """A session: its followers, and what they have read since they were woken, and when."""

    def __init__(self) -> None:
        self.followers: set[Follower] = set()
        self.reads: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._woken_s = -math.inf

    def wake(self, pause_s: float = 0.0) -> None:
        """Wakes all, ``pause_s`` after the last time at the earliest."""
        loop = asyncio.get_running_loop()
        if (due_s := self._woken_s + pause_s) > loop.time():
            self._timer = self._timer or loop.call_at(due_s, self.wake)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._woken_s = None, loop.time()
        self.reads.clear()
        for follower in self.followers:
            follower.changed.set()


class Follower:
    """One of a session's. ``changed`` is set when its log has got longer in this process."""

    def __init__(self, followed: _Followed) -> None:
        self.changed = asyncio.Event()
        self._followed = followed

    async def shared(self, key: Hashable, read: Callable[[], Awaitable[R]], max_age_s: float) -> R:
        """What ``read`` returns: once for all who ask for ``key`` before they are woken again.

        It is read again after ``max_age_s``.
        """
        reads, now_s = self._followed.reads, asyncio.get_running_loop().time()
        began_s, reading = reads.pop(key, (now_s, None))
        if reading is None or now_s - began_s >= max_age_s:
            began_s, reading = now_s, asyncio.ensure_future(read())
        reads[key] = began_s, reading
        if len(reads) > MAX_READS:
            del reads[next(iter(reads))]
        result: R = await asyncio.shield(reading)  # others wait for it too
        return result


class Followers:
    """Belongs to the event loop. Once `end` was called, following is of no use any more.

    ``tenants`` are by owner; one that is not in it has the common bound. See `WAKE_S` for
    ``wake_s``.
    """

    def __init__(
        self,
        tenants: Callable[[], Mapping[str, TenantAccount]] = dict,
        wake_s: float = WAKE_S,
    ) -> None:
        self.has_ended = False
        self._tenants, self._wake_s = tenants, wake_s
        self._of: dict[str, tuple[str, _Followed]] = {}
        self._num = Counter[str]()

    @contextmanager
    def follow(self, session: str, owner: str) -> Iterator[Follower]:
        """One more follower of ``session``. Raises `TooManyFollowers`."""
        tenant = self._tenants().get(owner)
        bound = (tenant and tenant.limits.max_running) or MAX_FOLLOWERS
        if self._num[owner] >= bound:
            raise TooManyFollowers(bound)
        _, followed = self._of.setdefault(session, (owner, _Followed()))
        follower = Follower(followed)
        followed.followers.add(follower)
        self._num[owner] += 1
        try:
            yield follower
        finally:
            self._num[owner] -= 1
            if not self._num[owner]:
                del self._num[owner]
            followed.followers.discard(follower)
            if not followed.followers:
                del self._of[session]

    def note(self, records: Sequence[Record]) -> None:
        """These are in the log now."""
        if self._of:
            for session in {session for session, _ in records} & self._of.keys():
                owner, followed = self._of[session]
                followed.wake(self._num[owner] * self._wake_s)

    def end(self) -> None:
        """Wakes all, as the server is about to stop or its model to be replaced."""
        self.has_ended = True
        for _, followed in self._of.values():
            followed.wake()
