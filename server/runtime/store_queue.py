"""The queue to the store thread: steps of the engine thread, and questions of the event loop.

Steps are bounded by the room of `DeliveryQueue`, questions by the clients that wait for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from server.errors import RequestError
from server.runtime.delivery_queue import EngineStep
from server.store.base import Store
from server.store.errors import StoreError

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
        with self._changed:
            seen = any(command.logged for command in step.commands)
            if not (step.records or seen or self._items or self._busy):
                return False
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
