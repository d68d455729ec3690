"""The thread that owns the store: what a step has made is safe before anybody sees it.

All steps that wait are one commit, so a slow disk makes larger commits and not
more of them. Questions to the store come in between, in their turn. When a
commit fails, the engine is told to forget what it has of kept sessions, and what
it made of them since is dropped: they go on from what the store has. Where the store
refuses the records of one session, that happens to this session alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from server.engine.value import Record
from server.errors import RequestError
from server.store.base import Store
from server.store.errors import Fenced, RecordRefused, StoreError, StoreLost

logger = logging.getLogger("everstream.store_thread")

MAINTENANCE_S = 1.0
#: Where the store has more to do, bit by bit, so that no commit waits for long.
SOON_S = 0.08

R = TypeVar("R")


class StoreStep(Protocol):
    """What the store thread knows of a step of the engine's thread.

    ``generation`` counts the times that the engine has forgotten its kept
    sessions. ``lost`` has the sessions whose records are not in the store, and why.
    """

    records: list[Record]
    generation: int
    lost: dict[str, RequestError]


class Forget(Protocol):
    """Tells the engine to forget one kept session, or all, as of a new generation."""

    def __call__(
        self, generation: int, error: RequestError, session: str | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class _Call:
    ask: Callable[[Store], Any]
    future: Future[Any] = field(default_factory=Future)


class StoreThread:
    """``deliver`` gets each step when it is safe, in order, in this thread or in that of `add`.

    ``forget`` is called after a failure. ``died`` is called
    where there is no going on: another process has the store, or an error of ours.
    ``error`` says why kept sessions cannot go on at present.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        deliver: Callable[[Any], None],
        forget: Forget,
        died: Callable[[], None],
    ) -> None:
        self.error: RequestError | None = None
        self.store_id = store.store_id
        self.working_since: float | None = None
        self._store, self._clock = store, clock
        self._deliver, self._forget, self._died = deliver, forget, died
        self._items: deque[Any] = deque()
        self._taken: list[Any] = []
        self._changed = threading.Condition()
        self._closed = False
        self._busy = False
        self._generation = self._all_since = 0
        self._last_error: RequestError | None = None
        #: Sessions that the engine has been told to forget: since when, and why.
        self._refused: dict[str, tuple[int, RequestError]] = {}
        self._maintained_s, self._pause_s = clock(), MAINTENANCE_S
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)

    @property
    def generation(self) -> int:
        """When the engine last forgot all: whatever was asked before it grew may be of no use."""
        return self._all_since

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Commits what waits and gives the store back; False if that took too long."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def add(self, step: StoreStep) -> None:
        """A step of the engine thread; with nothing to log or to wait for, delivered at once."""
        with self._changed:
            if step.records or self._items or self._busy:
                self._items.append(step)
                self._changed.notify()
                return
        self._deliver(step)

    def ask(self, ask: Callable[[Store], R]) -> Future[R]:
        """A question to the store, after all that has been added before."""
        call = _Call(ask)
        with self._changed:
            if self._closed:
                call.future.set_exception(StoreError("the store is closed"))
            else:
                self._items.append(call)
                self._changed.notify()
        return call.future

    # The thread

    def _run(self) -> None:
        try:
            while (items := self._take()) is not None:
                self._work(items)
                self._maintain()
            self._store.close()
        except BaseException:  # whatever it is, the thread ends
            logger.exception("the store thread failed")
            self.error = StoreError("the store's thread has died")
            with self._changed:
                self._closed = True  # there would be no answer
                unanswered = [*self._taken, *self._items]
            for item in unanswered:
                if isinstance(item, _Call) and not item.future.done():
                    item.future.set_exception(self.error)
            self._died()

    def _take(self) -> list[Any] | None:
        with self._changed:
            self._busy = False
            self.working_since = None
            if not self._items and not self._closed:
                self._changed.wait(self._pause_s)
            if self._closed and not self._items:
                return None
            items = self._taken = list(self._items)
            self._items.clear()
            self._busy = True
            self.working_since = self._clock()
            return items

    def _work(self, items: list[Any]) -> None:
        steps: list[StoreStep] = []
        for item in items:
            if isinstance(item, _Call):
                self._commit(steps)
                steps = []
                self._answer(item)
            else:
                steps.append(item)
        self._commit(steps)

    def _commit(self, steps: list[StoreStep]) -> None:
        if steps and self._refused:
            self._forget_refused(steps[0].generation)
        records = [record for step in steps for record in self._valid(step)]
        if records:
            try:
                refused = commit_apart(self._store, records)
            except StoreError as error:
                self._fail(error)
            else:
                self._refuse(refused)
            self._note_store()
        for step in steps:
            self._note_lost(step)
            self._deliver(step)

    def _valid(self, step: StoreStep) -> list[Record]:
        """The records of ``step`` that the engine has made of sessions as the store has them."""
        if step.generation < self._all_since:
            return []
        if not self._refused:
            return step.records
        return [record for record in step.records if not self._is_refused(record[0], step)]

    def _is_refused(self, session: str, step: StoreStep) -> bool:
        return session in self._refused and step.generation < self._refused[session][0]

    def _note_lost(self, step: StoreStep) -> None:
        if step.records and step.generation < self._all_since:
            assert self._last_error is not None
            step.lost = dict.fromkeys((id for id, _ in step.records), self._last_error)
        elif self._refused:
            lost = {id for id, _ in step.records if self._is_refused(id, step)}
            step.lost = {id: self._refused[id][1] for id in lost}

    def _refuse(self, errors: Mapping[str, StoreError]) -> None:
        """The engine forgets these sessions, and goes on with all others."""
        for session, error in errors.items():
            logger.error("session %s: %s", session, error)
            self._generation += 1
            self._refused[session] = self._generation, error
            self._forget(self._generation, error, session)

    def _forget_refused(self, generation: int) -> None:
        """The engine has forgotten those of ``generation`` and before."""
        left = self._refused.items()
        self._refused = {id: refusal for id, refusal in left if refusal[0] > generation}

    def _fail(self, error: StoreError) -> None:
        logger.error("the store failed: %s", error)
        self.error = error
        self._forget_all(error)
        self._store.forget()
        if isinstance(error, Fenced):
            self._died()

    def _forget_all(self, error: RequestError) -> None:
        self._generation += 1
        self._all_since, self._last_error = self._generation, error
        self._forget(self._generation, error)

    def _answer(self, call: _Call) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            answer = self._asked(call)
        except RequestError as error:
            call.future.set_exception(error)
        except Exception as error:
            logger.exception("a question to the store failed")
            call.future.set_exception(error)
        else:
            call.future.set_result(answer)

    def _asked(self, call: _Call) -> Any:
        """Whoever is answered knows which store it was: it may have become another one."""
        try:
            return call.ask(self._store)
        finally:
            self._note_store()

    def _note_store(self) -> None:
        """Where the store has become another one, what the engine has is no part of it."""
        if self._store.store_id != self.store_id:
            self.store_id = self._store.store_id
            self._forget_all(StoreLost("the store is another one than before"))

    def _maintain(self) -> None:
        now = self._clock()
        if now - self._maintained_s < self._pause_s:
            return
        self._maintained_s, self._pause_s = now, MAINTENANCE_S
        try:
            if self._store.maintain(now):
                self._pause_s = SOON_S
        except StoreError as error:
            if self.error is None or isinstance(error, Fenced):
                self._fail(error)
        else:
            if self.error is not None:
                logger.warning("the store works again")
            self.error = None
        self._note_store()


def commit_apart(store: Store, records: Sequence[Record]) -> dict[str, StoreError]:
    """Commits what the store takes of ``records``; why it refuses the sessions of the others.

    Where it refuses something, the sessions are halved until those at fault are alone.
    Raises what `Store.commit` raises for other reasons, and then part of them may count.
    """
    try:
        store.commit(records)
    except (RecordRefused, StoreLost) as error:
        sessions = list(dict.fromkeys(id for id, _ in records))
        if len(sessions) == 1:
            return {sessions[0]: error}
    else:
        return {}
    first = set(sessions[: len(sessions) // 2])
    return {
        **commit_apart(store, [record for record in records if record[0] in first]),
        **commit_apart(store, [record for record in records if record[0] not in first]),
    }
