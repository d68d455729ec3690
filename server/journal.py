"""The thread that owns the store: what a step has made is safe before anybody sees it.

All steps that wait are one commit, so a slow disk makes larger commits and not
more of them. Questions to the store come in between, in their turn. When a
commit fails, the engine is told to forget what it has of kept sessions, and what
it made of them since is dropped: they go on from what the store has.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from server.engine.errors import EngineError
from server.engine.value import Record
from server.store.base import Store
from server.store.errors import Fenced, StoreError, StoreLost

logger = logging.getLogger("everstream.journal")

MAINTENANCE_S = 1.0
#: Where the store has more to do, bit by bit, so that no commit waits for long.
SOON_S = 0.08

R = TypeVar("R")


class Step(Protocol):
    """What the journal knows of a step of the engine's thread.

    ``generation`` counts the times that the engine has forgotten its kept
    sessions. ``lost`` is set where the records are not in the store.
    """

    records: list[Record]
    generation: int
    lost: EngineError | None


@dataclass(frozen=True, slots=True)
class _Call:
    ask: Callable[[Store], Any]
    future: Future[Any] = field(default_factory=Future)


class Journal:
    """``pass_on`` gets each step when it is safe, in order, in this thread.

    ``forget`` is called with a new generation after a failure. ``died`` is called
    where there is no going on: another process has the store, or an error of ours.
    ``error`` says why kept sessions cannot go on at present.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        pass_on: Callable[[Any], None],
        forget: Callable[[int, EngineError], None],
        died: Callable[[], None],
    ) -> None:
        self.error: EngineError | None = None
        self.store_id = store.store_id
        self.working_since: float | None = None
        self._store, self._clock = store, clock
        self._pass_on, self._forget, self._died = pass_on, forget, died
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._busy = False
        self._generation = 0
        self._last_error: EngineError | None = None
        self._maintained_s, self._pause_s = clock(), MAINTENANCE_S
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    @property
    def generation(self) -> int:
        """Of what the engine has: whatever was asked before it grew may be of no use."""
        return self._generation

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Commits what waits and gives the store back; False if that took too long."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def add(self, step: Step) -> None:
        """A step of the engine's thread; with nothing to log or to wait for it goes on at once."""
        with self._changed:
            if step.records or self._items or self._busy:
                self._items.append(step)
                self._changed.notify()
                return
        self._pass_on(step)

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
        except BaseException:  # whatever it is, the thread is no more
            logger.exception("the journal failed")
            self.error = StoreError("the store's thread has died")
            with self._changed:
                self._closed = True  # nobody would answer
            self._died()

    def _take(self) -> list[Any] | None:
        with self._changed:
            self._busy = False
            self.working_since = None
            if not self._items and not self._closed:
                self._changed.wait(self._pause_s)
            if self._closed and not self._items:
                return None
            items = list(self._items)
            self._items.clear()
            self._busy = True
            self.working_since = self._clock()
            return items

    def _work(self, items: list[Any]) -> None:
        steps: list[Step] = []
        for item in items:
            if isinstance(item, _Call):
                self._commit(steps)
                steps = []
                self._answer(item)
            else:
                steps.append(item)
        self._commit(steps)

    def _commit(self, steps: list[Step]) -> None:
        valid = [step for step in steps if step.generation == self._generation]
        records = [record for step in valid for record in step.records]
        if records:
            try:
                self._store.commit(records)
            except StoreError as error:
                self._fail(error)
            self._note_store()
        for step in steps:
            if step.records and step.generation != self._generation:
                step.lost = self._last_error
            self._pass_on(step)

    def _fail(self, error: StoreError) -> None:
        logger.error("the store failed: %s", error)
        self.error = self._last_error = error
        self._generation += 1
        self._forget(self._generation, error)
        self._store.forget()
        if isinstance(error, Fenced):
            self._died()

    def _answer(self, call: _Call) -> None:
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            answer = self._asked(call)
        except EngineError as error:
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
            self._generation += 1
            self._last_error = StoreLost("the store is another one than before")
            self._forget(self._generation, self._last_error)

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
