"""What runs in the next step: a decision over counts and positions, without tensors.

Every running request gets one token per step: its next one to decode, or the
next one of its prompt where that is off the grid. Beside them at most
`CHUNKS_PER_STEP` whole chunks of prompts run, taken in turn. So a long prompt
delays each token of another stream by no more than one chunk, and two long
prompts advance alike.

Chunks start at multiples of ``chunk_size`` counted from position 0 of the
session, whatever else is running: the grid is part of the definition of a
session's bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

CHUNKS_PER_STEP = 1


class Schedulable(Hashable, Protocol):
    """What the scheduler reads of a request."""

    @property
    def position(self) -> int:
        """Tokens that the session's state has seen."""

    @property
    def num_unfed(self) -> int:
        """Tokens known but not yet fed: of the prompt, or the last one sampled."""


R = TypeVar("R", bound=Schedulable)


@dataclass(frozen=True)
class Plan(Generic[R]):
    """One step: ``chunks`` feed ``chunk_size`` tokens each, ``steps`` one token each."""

    chunks: list[R]
    steps: list[R]


class Scheduler(Generic[R]):
    """First come, first served up to ``max_running`` requests; in turn for chunks."""

    def __init__(self, chunk_size: int, max_running: int, max_waiting: int) -> None:
        self.chunk_size = chunk_size
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.waiting: deque[R] = deque()
        self.running: dict[R, None] = {}  # in the order of their turns

    @property
    def has_room(self) -> bool:
        """Whether one more request may be added."""
        return len(self.running) + len(self.waiting) < self.max_running + self.max_waiting

    def add(self, request: R) -> None:
        assert self.has_room
        self.waiting.append(request)

    def remove(self, request: R) -> None:
        """Takes out a request, wherever it is."""
        if request in self.running:
            del self.running[request]
        else:
            self.waiting.remove(request)

    def admit(self) -> list[R]:
        """Moves waiting requests to running while there is room; returns them."""
        admitted = []
        while self.waiting and len(self.running) < self.max_running:
            admitted.append(self.waiting.popleft())
            self.running[admitted[-1]] = None
        return admitted

    def plan(self) -> Plan[R]:
        """The next step for the running requests."""
        on_grid = [r for r in self.running if self._fits_chunk(r)]
        chunks, held = on_grid[:CHUNKS_PER_STEP], set(on_grid)
        for request in chunks:  # to the back of the queue
            del self.running[request]
            self.running[request] = None
        return Plan(chunks, [r for r in self.running if r not in held])

    def _fits_chunk(self, request: R) -> bool:
        return request.position % self.chunk_size == 0 and request.num_unfed >= self.chunk_size
