"""What the event loop asks of the engine: calls that the engine thread runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal, Protocol, TypeVar

from server.engine.engine import Engine
from server.engine.session import Past, SessionValue
from server.engine.types import Request, SessionInfo
from server.errors import RequestError
from server.store.base import StoreFailed

# -------------------------------------------------------------------------------------------------
# What the async engine needs of an owner with limits: see `server.api.auth`.


Room = Literal["max_running", "max_sessions", "max_stored_bytes"]


class TenantLimits(Protocol):
    """What is kept for a tenant; None is no bound."""

    @property
    def max_running(self) -> int | None: ...
    @property
    def max_sessions(self) -> int | None: ...
    @property
    def max_stored_bytes(self) -> int | None: ...


class TenantAccount(Protocol):
    """An owner with limits: see `server.api.auth`."""

    @property
    def limits(self) -> TenantLimits: ...
    @property
    def keeping(self) -> asyncio.Lock: ...

    def check_tokens(self) -> None: ...
    def check_room(self, limit: Room, number: int, /) -> None: ...
    def spend(self, num_tokens: int, /) -> None: ...


# -------------------------------------------------------------------------------------------------
# Each function here returns a call, or is one; the rest of the calls are single methods of the
# engine. They run in the engine thread, between two steps.


#: Sessions whose states are copied before the store has written them.
EVICTED_AT_ONCE = 32

R = TypeVar("R")

Call = Callable[[Engine, float], R]


@dataclass(slots=True)
class Command:
    """A call on the engine, and the future in the event loop that wants its result, if any.

    ``logged`` are the sessions that it has changed or seen: it counts only if all records of
    theirs do that were made by then. ``arrived`` is called with the result in the event loop,
    before any event that came after it, unless nothing waits for it any more or the session is
    absent. With a ``generation`` it begins a new one: nothing before it is in the same step.
    """

    call: Call[Any]
    future: asyncio.Future[Any] | None = None
    request_ids: tuple[str, ...] = ()
    arrived: Callable[[Any], None] | None = None
    result: Any = None
    error: RequestError | None = None
    logged: frozenset[str] = frozenset()
    generation: int | None = None


class Absent(Enum):
    """The engine does not have the session that a command is for; nothing has changed."""

    ABSENT = auto()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A loaded session, which the engine restores before it runs the command that brings it.

    It ``is_current`` unless the engine was told to forget all since before the store was read.
    With ``continues`` another replica has just run it, and its request continues without a reader.
    """

    past: Past
    is_current: Callable[[], bool]
    continues: bool = False


def on_session(
    session: str, owner: str, call: Call[R], arrival: Arrival | None = None
) -> Call[R | Absent]:
    """``call`` for one kept session: `Absent` where the engine does not have it.

    With an ``arrival`` the engine restores the session first.
    """

    def run(engine: Engine, now: float) -> R | Absent:
        engine.expire(now)
        if arrival is None:
            return call(engine, now) if engine.kept.has(session, owner) else Absent.ABSENT
        if not arrival.is_current():
            raise StoreFailed("the session store failed just now; try again")
        engine.kept.restore(arrival.past, now)
        if arrival.continues:
            engine.continue_unattended(session, owner)
        return call(engine, now)

    return run


def submit(
    request: Request, start: SessionValue | None, tenant: TenantAccount | None
) -> Call[None]:
    """Starts a request; a new session begins as ``start`` says, and else empty."""

    def run(engine: Engine, now: float) -> None:
        _check_running(engine, tenant, request.owner, len(request.ids))
        engine.submit(request, now, start)

    return run


def continue_unattended(session: str, owner: str, tenant: TenantAccount | None) -> Call[None]:
    """Lets what a session runs continue, without a reader."""

    def run(engine: Engine, now: float) -> None:
        _check_running(engine, tenant, owner, engine.num_starting(session, owner))
        engine.continue_unattended(session, owner)

    return run


def evict(max_sessions: int) -> Call[int]:
    """Saves and evicts some of the kept sessions, at most so many; returns how many."""

    def run(engine: Engine, now: float) -> int:
        return engine.kept.retire(0) - engine.kept.retire(min(max_sessions, EVICTED_AT_ONCE))

    return run


@dataclass(slots=True)
class Attach:
    """Gives what a session runs a reader, as ``request_id``. A call."""

    session: str
    owner: str
    request_id: str
    take_over: bool
    tenant: TenantAccount | None
    is_attached: bool = False

    def __call__(self, engine: Engine, now: float) -> SessionInfo:
        num_more = engine.num_starting(self.session, self.owner)
        _check_running(engine, self.tenant, self.owner, num_more)
        info = engine.attach(self.session, self.owner, self.request_id, self.take_over)
        self.is_attached = True
        return info


def _check_running(engine: Engine, tenant: TenantAccount | None, owner: str, num_more: int) -> None:
    """Raises `RequestError` where the owner may not run so many more."""
    if num_more and tenant is not None:
        tenant.check_room("max_running", engine.num_running(owner) + num_more)


def cancel(request_id: str) -> Command:
    """Asks for the end of a request; its `Finished` event comes to its reader."""
    return Command(lambda engine, now: engine.cancel(request_id))


def detach(request_id: str) -> Command:
    """The request has no reader any more."""
    return Command(lambda engine, now: engine.detach(request_id))


def park(request_id: str) -> Command:
    """Pauses a request."""
    return Command(lambda engine, now: engine.park(request_id))


def unpark(request_id: str) -> Command:
    """Lets a paused request continue."""
    return Command(lambda engine, now: engine.unpark(request_id))


def forget(generation: int, error: RequestError, session: str | None = None) -> Command:
    """Drops one kept session, or all, and begins a generation."""
    call: Call[None] = lambda engine, now: engine.kept.discard(error, session)  # noqa: E731
    return Command(call, generation=generation)
