"""The thread that owns an engine: commands go in, what each turn has made comes out.

It sleeps while there is nothing to do. When it ends it releases the engine, and so
of the model and the states: no other thread has them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.engine.prefix_cache import Evicted
from server.engine.types import EngineStats, Event, Finished, Request, SessionInfo, TokenEvent
from server.engine.value import Accepted, Past, Record, SessionValue, StateBlock
from server.errors import InternalFailure, RequestError
from server.runtime.command_queue import CommandQueue
from server.runtime.store_thread import StoreThread

logger = logging.getLogger("everstream.engine_thread")

MAX_COMMANDS = 4096
MAX_UNDELIVERED = 16

Clock = Callable[[], float]


class EngineLike(Protocol):
    """What is needed of `server.engine.engine.Engine`; see there."""

    def submit(self, request: Request, now: float, start: SessionValue | None = None) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def park(self, request_id: str) -> None: ...
    def unpark(self, request_id: str) -> None: ...
    def detach(self, request_id: str) -> None: ...
    def attach(self, session: str, owner: str, request_id: str, take_over: bool) -> SessionInfo: ...
    def go_on(self, session: str, owner: str) -> None: ...
    def create_session(self, owner: str, now: float) -> SessionInfo: ...
    def has_session(self, session: str, owner: str) -> bool: ...
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
    def give(self, session: str, owner: str, how: str, now: float) -> SessionInfo | None: ...
    def discard_kept(self, error: RequestError, id: str | None = None) -> None: ...
    def insert_prefix(
        self, owner: str, tokens: tuple[int, ...], block: StateBlock, origin: str = ""
    ) -> None: ...
    def take_usage(self) -> dict[str, int]: ...
    def num_running(self, owner: str) -> int: ...
    def num_starting(self, session: str, owner: str) -> int: ...
    def take_evicted_prefixes(self) -> list[Evicted]: ...
    def take_records(self) -> list[Record]: ...
    def step(self, now: float) -> list[Event]: ...
    def has_work(self) -> bool: ...
    def next_expiry(self) -> float | None: ...
    def expire(self, now: float) -> None: ...
    def stats(self) -> EngineStats: ...


@dataclass(slots=True)
class Command:
    """A call on the engine, and the future in the event loop that wants its result.

    ``logged`` are the sessions of whose records it counts only if these do. ``arrived`` is
    called with the result in the event loop, before any event that came after it,
    unless nothing waits for it any more.
    With a ``generation`` it begins a new one: nothing before it is in the same step.
    """

    call: Callable[[EngineLike, float], Any]
    future: asyncio.Future[Any] | None
    request_ids: tuple[str, ...] = ()
    arrived: Callable[[Any], None] | None = None
    result: Any = None
    error: RequestError | None = None
    logged: frozenset[str] = frozenset()
    generation: int | None = None


@dataclass(slots=True)
class EngineStep:
    """What one turn of the thread has made, and when it was done.

    ``is_idle``: the engine had nothing to compute after it.
    """

    commands: list[Command]
    events: list[Event]
    records: list[Record]
    generation: int
    done_s: float
    prefixes: list[Evicted] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    lost: dict[str, RequestError] = field(default_factory=dict)
    is_idle: bool = False

    def lose(self) -> None:
        """Removes what has not been logged: it must not be seen."""
        for command in self.commands:
            if command.error is None:
                lost = (self.lost[id] for id in command.logged if id in self.lost)
                command.error = next(lost, None)
        requests = {_request_id(entry) for id, entry in self.records if id in self.lost}
        self.events = [event for event in self.events if event.request_id not in requests]


class EngineThread:
    """Each step goes to ``store_thread``; ``died`` is called at an error, in this thread.

    The thread waits while `MAX_UNDELIVERED` steps are not yet `delivered`.
    ``working_since`` is when the turn began that it is at.
    """

    def __init__(
        self,
        engine: EngineLike,
        clock: Clock,
        store_thread: StoreThread,
        died: Callable[[], None],
    ) -> None:
        self.working_since: float | None = None
        self._clock = clock
        self._store_thread, self._died = store_thread, died
        self._command_queue: CommandQueue[Command] = CommandQueue(MAX_COMMANDS)
        self._undelivered = threading.Semaphore(MAX_UNDELIVERED)
        self._generation = 0
        self._told_idle = True
        self._thread = threading.Thread(
            target=self._run, args=(engine,), name="engine", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Refuses further commands; the thread ends after those that it has."""
        self._command_queue.close()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end; False if it did not come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def post(self, command: Command, *, urgent: bool = False) -> bool:
        """See `server.runtime.command_queue.CommandQueue.post`."""
        return self._command_queue.post(command, urgent=urgent)

    def delivered(self, num_steps: int) -> None:
        """So many steps have arrived."""
        self._undelivered.release(num_steps)

    # The thread

    def _run(self, engine: EngineLike) -> None:
        try:
            while (commands := self._command_queue.take(self._patience_s(engine))) is not None:
                self._turn(engine, commands)
        except BaseException:  # whatever it is, the thread ends
            logger.exception("the engine failed")
            self._died()

    def _patience_s(self, engine: EngineLike) -> float | None:
        """How long the thread may wait for a command: without a limit, unless there is work."""
        if engine.has_work():
            return 0.0
        expiry = engine.next_expiry()
        return None if expiry is None else max(0.0, expiry - self._clock())

    def _turn(self, engine: EngineLike, commands: list[Command]) -> None:
        now = self.working_since = self._clock()
        step = self._new_step(engine)
        for command in commands:
            if command.generation is not None:
                self._finish(step)
                self._generation = command.generation
                step = self._new_step(engine)
            _execute(command, engine, now)
            step.commands.append(command)
            if made := engine.take_records():
                command.logged = frozenset(id for id, _ in made)
                step.records += made
        step.events = engine.step(now)
        step.records += engine.take_records()
        step.prefixes = engine.take_evicted_prefixes()
        step.usage = engine.take_usage()
        step.is_idle = not engine.has_work()
        self.working_since = None
        self._finish(step)

    def _new_step(self, engine: EngineLike) -> EngineStep:
        return EngineStep([], [], engine.take_records(), self._generation, self._clock())

    def _finish(self, step: EngineStep) -> None:
        """The step is for the store thread, unless it has nothing that anybody waits for."""
        made = step.commands or step.events or step.records or step.prefixes or step.usage
        if made or step.is_idle != self._told_idle:
            self._undelivered.acquire()
            step.done_s = self._clock()
            self._told_idle = step.is_idle
            self._store_thread.add(step)


def _execute(command: Command, engine: EngineLike, now: float) -> None:
    try:
        command.result = command.call(engine, now)
    except RequestError as error:
        command.error = error
    except Exception:
        logger.exception("a command failed")
        command.error = InternalFailure("the engine could not do this")


def _request_id(entry: object) -> str | None:
    if isinstance(entry, TokenEvent | Finished):
        return entry.request_id
    return entry.request.request_id if isinstance(entry, Accepted) else None
