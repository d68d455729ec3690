"""What runs in the next step: a decision over counts and positions, without tensors.

A prompt is fed in chunks on a fixed grid: a chunk of size s starts at a multiple
of s, counted from position 0 of the session, and the largest size that fits is
taken, whatever else is running. The grid is part of the definition of a
session's bits. What fits no chunk goes token by token.

Every running request gets one token per step: its next one to decode, or of its
prompt where that is off the grid. Beside them at most `PREFILL_TOKENS` tokens of
chunks run, taken in turn. So prompts, however long or many, delay each token of
another stream by no more than that, and long prompts advance alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

#: Tokens of prompts that one step feeds in chunks; no chunk is larger.
PREFILL_TOKENS = 128


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

    chunk_size: int
    chunks: list[R]
    steps: list[R]


class Scheduler(Generic[R]):
    """First come, first served up to ``max_running`` requests; in turn for chunks.

    ``chunk_sizes`` are in descending order, each a multiple of the next.
    """

    def __init__(self, chunk_sizes: tuple[int, ...], max_running: int, max_waiting: int) -> None:
        assert chunk_sizes[0] <= PREFILL_TOKENS, chunk_sizes
        self.chunk_sizes = chunk_sizes
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
        sizes = {request: self._chunk_size(request) for request in self.running}
        size = next((size for size in sizes.values() if size), 1)
        chunks = [r for r in self.running if sizes[r] == size > 1][: PREFILL_TOKENS // size]
        for request in chunks:  # to the back of the queue
            del self.running[request]
            self.running[request] = None
        return Plan(size, chunks, [r for r in self.running if not sizes[r]])

    def _chunk_size(self, request: R) -> int:
        """The size of the chunk that the request's next tokens make; 0 for none."""
        for size in self.chunk_sizes:
            if request.position % size == 0 and request.num_unfed >= size:
                return size
        return 0
