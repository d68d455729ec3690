"""What runs in the next step: a decision over counts and positions, without tensors.

A row of the plan feeds tokens of one request: those of its text that are unfed, and drafts
of those that follow. A prompt and a stream that is decoded differ in that number alone. A request
with one unfed token (or, where there is a drafter, no more than it may leave unfed) is fed in
every step. In addition at most `PREFILL_TOKENS` tokens of longer rows are fed, taken in turn. So
prompts, however long or many, delay each token of another stream by no more than that, and long
prompts advance alike. Drafts, and what rejected drafts have left unfed, have a bound of their own:
`DRAFT_TOKENS`.

Where more requests are there than can run, owners take turns, and a request that
generates without end makes room after `TURN_TOKENS` tokens: its state is one
small copy, so that costs next to nothing.

Where the runner has a grid, because another cut of a prompt would give other
bits, a chunk of size s starts at a multiple of s, counted from position 0 of
the session, and the largest size that fits is taken, whatever else is running.
The grid is part of the definition of a session's bits. What fits no chunk goes
token by token, and the chunks of one step have one size.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

#: Tokens of prompts that one step feeds; no chunk is larger.
PREFILL_TOKENS = 128

#: Drafts in one step, and tokens that earlier drafts have left unfed, of all requests together;
#: what is unfed is fed in any case.
DRAFT_TOKENS = 64

#: Tokens that a request generates before it makes room for one that waits.
TURN_TOKENS = 256


class Schedulable(Hashable, Protocol):
    """What the scheduler reads of a request."""

    @property
    def position(self) -> int:
        """Tokens that the session's state has seen."""

    @property
    def num_unfed(self) -> int:
        """Tokens known but not yet fed: of the prompt, or the last one sampled."""

    @property
    def num_drafts(self) -> int:
        """Tokens proposed to follow those that are unfed."""

    @property
    def owner(self) -> str:
        """The tenant."""

    @property
    def num_in_turn(self) -> int:
        """Tokens generated since the request began to run."""


R = TypeVar("R", bound=Schedulable)


#: A row of a step, ``(request, num_tokens, num_drafts)``: the request feeds so many of its unfed
#: tokens, and then so many drafts. A plain tuple, because there is one for every token.
Row = tuple[R, int, int]


class Scheduler(Generic[R]):
    """In turn for owners, and for the requests of an owner; up to ``max_running`` at once.

    ``grid`` has chunk sizes in descending order, each a multiple of the next,
    or none where prompts may be cut anywhere. ``max_drafts``: see `Drafter`; none with a grid.
    """

    def __init__(
        self, grid: tuple[int, ...], max_running: int, max_waiting: int, max_drafts: int = 0
    ) -> None:
        assert not grid or (grid[0] <= PREFILL_TOKENS and not max_drafts), (grid, max_drafts)
        self.grid, self._max_short = grid, 1 + max_drafts
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.running: dict[R, None] = {}  # in the order of their turns
        self._waiting: OrderedDict[str, deque[R]] = OrderedDict()  # the next owner first

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def has_room(self) -> bool:
        """Whether one more request may be added."""
        return len(self.running) + self.num_waiting < self.max_running + self.max_waiting

    def add(self, request: R) -> None:
        """The request waits, behind those of its owner."""
        self._waiting.setdefault(request.owner, deque()).append(request)

    def remove(self, request: R) -> None:
        """Takes out a request, wherever it is."""
        if request in self.running:
            del self.running[request]
            return
        queue = self._waiting[request.owner]
        queue.remove(request)
        if not queue:
            del self._waiting[request.owner]

    def next_waiting(self) -> R | None:
        """Whose turn it is to run."""
        for queue in self._waiting.values():
            return queue[0]
        return None

    def start(self, request: R) -> None:
        """`next_waiting` runs from now on; then it is another owner's turn."""
        queue = self._waiting.pop(request.owner)
        assert queue.popleft() is request
        if queue:
            self._waiting[request.owner] = queue
        self.running[request] = None

    def find_preemptible(self) -> R | None:
        """A running request that others may preempt, if one waits and one has had `TURN_TOKENS`."""
        if not self._waiting:
            return None
        return next((r for r in self.running if r.num_in_turn >= TURN_TOKENS), None)

    def plan(self) -> list[Row[R]]:
        """The rows of the next step: those of prompts first."""
        short: list[Row[R]] = []
        prompts: list[R] = []
        left = DRAFT_TOKENS
        max_short = self._max_short
        for request in self.running:
            num_tokens = request.num_unfed
            if num_tokens > max_short:
                prompts.append(request)
            elif max_short == 1:
                short.append((request, 1, 0))
            else:
                left -= num_tokens - 1
                num_drafts = max(0, min(request.num_drafts, left))
                left -= num_drafts
                short.append((request, num_tokens, num_drafts))
        if not prompts:
            return short
        chunks = self._chunks_on_grid(prompts) if self.grid else self._chunks(prompts)
        for request, num_tokens, _ in chunks:
            if num_tokens > 1:  # to the back of the queue
                del self.running[request]
                self.running[request] = None
        return chunks + short

    def _chunks(self, prompts: list[R]) -> list[Row[R]]:
        """As many tokens as the bound leaves, to the first in turn first."""
        chunks: list[Row[R]] = []
        left = PREFILL_TOKENS
        for request in prompts:
            if not left:
                break
            size = min(request.num_unfed, left)
            chunks.append((request, size, 0))
            left -= size
        return chunks

    def _chunks_on_grid(self, prompts: list[R]) -> list[Row[R]]:
        """Chunks of the size that is first in turn; one token each for what is off the grid."""
        sizes = {request: self._chunk_size(request) for request in prompts}
        size = next((size for size in sizes.values() if size > 1), 1)
        chunks = [(r, size, 0) for r in prompts if sizes[r] == size > 1][: PREFILL_TOKENS // size]
        return chunks + [(r, 1, 0) for r in prompts if sizes[r] == 1]

    def _chunk_size(self, request: R) -> int:
        """The size of the chunk that the request's next tokens make; 1 where they make none."""
        for size in self.grid:
            if request.position % size == 0 and request.num_unfed >= size:
                return size
        return 1
