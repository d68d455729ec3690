"""What runs the model: one call per step, a pool of states, the native runtime behind both."""

from __future__ import annotations

import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from model.architectures.hybrid import place_of
from model.state import ALIGNMENT, StateLayout
from model.tensor_spec import POSITION_BLOCK
from server.engine.sampling import PENALTY_WINDOW, is_greedy
from server.engine.session import StateBlock
from server.engine.types import SamplingParams

if TYPE_CHECKING:
    from model.native.runtime import Runtime


# -------------------------------------------------------------------------------------------------
# What the engine needs of whatever runs the model: one call per step.
#
# There are two: `NativeRunner` below and, as the reference and for what
# the native runtime does not cover, `server.engine.torch_runner`.


#: In the place of a token: the model's output was not finite.
NOT_FINITE = -2

#: To which `Runner.embed` rounds; a float32 near one is no finer. Sums are exact below 2**29.
HIDDEN_UNIT = 2.0**-24

#: What a runner makes once of a request's parameters; opaque to all others.
Draw = Any

#: Bit ``i % 32`` of word ``i // 32`` says whether token i may be drawn: uint32, as many words as
#: the ids need or more.
Mask = npt.NDArray[np.uint32]


class Feed(NamedTuple):
    """One row of a step: ``tokens``, one or more, for the state of ``slot``.

    ``position`` counts the tokens that the state has seen. With a ``draw`` a token is sampled
    after each of the last ``num_draws`` of ``tokens``: after token i at position
    ``position + i + 1``. ``recent`` are the session's last tokens, all of these included, where
    a penalty needs them. ``allowed`` restricts the draws, one mask or None for each of them.
    ``wants_logprobs`` asks how likely the drawn tokens were. With a ``target``, one of
    `StatePool.spares`, the state goes there, and that of ``slot`` stays but for its past.
    """

    slot: int
    position: int
    tokens: Sequence[int]
    draw: Draw | None = None
    recent: Sequence[int] | None = None
    allowed: Sequence[Mask | None] | None = None
    num_draws: int = 1
    wants_logprobs: bool = False
    target: int | None = None


#: What a row gave, a plain tuple, because there is one for every token: its tokens, one for each
#: draw, or `NOT_FINITE` in the place of one; and, where the feed asks for them, as many
#: log-probabilities and lists of the most likely tokens: those of `TokenScore`, to the bit, NaN
#: and empty where there is no token.
RowOutput = tuple[Sequence[int], Sequence[float], Sequence[Sequence[tuple[int, float]]]]

#: Of a row that draws nothing.
NOTHING: RowOutput = ((), (), ())


class TokenScore(NamedTuple):
    """How likely a token was, and the most likely ones there: (id, log-probability), best first.

    Natural logarithms, at temperature 1 over the ids that exist, before bias,
    penalties, filters and mask. Of equal ones the lower id comes first. Where the
    model's output is not finite ``logprob`` is NaN and ``top`` empty.
    """

    logprob: float
    top: list[tuple[int, float]]


class Runner(Protocol):
    """The model on the rows of a state pool. Not thread-safe: the engine's thread owns it.

    ``grid`` has the chunk sizes, descending, on which prompts are cut, because
    another cut gives other bits; empty where every cut gives the same. With a grid a row
    draws one token at most.
    """

    @property
    def grid(self) -> tuple[int, ...]: ...

    def prepare(self, params: SamplingParams) -> Draw:
        """The draws of one request; ``params`` are checked by `server.engine.sampling`."""

    def run(self, feeds: Sequence[Feed]) -> list[RowOutput]:
        """Feeds every row, in place where it has no target; what each has drawn.

        No slot is in two rows. All or none: where it raises, whatever it is, no
        state has changed, so that the rows can be run again, also one by one.
        Raises `ValueError` for an ``allowed`` that allows no id that exists.
        """

    def score(self, feed: Feed, following: int, num_top: int = 0) -> list[TokenScore]:
        """Feeds one row as `run` does, but draws nothing, and says how likely its text was.

        ``feed.tokens`` are what `run` could be given: where there is a ``grid``,
        one of its sizes or a single token. Returns one for each of
        ``feed.tokens[1:]``, and for ``following``, which is not fed, after all
        before it, each with the ``num_top`` most likely tokens. Raises
        `ValueError`, before anything has changed, for a scored id that does not
        exist.
        """

    def embed(self, feed: Feed) -> npt.NDArray[np.float64]:
        """Feeds one row as `score` does; returns the sum of its tokens' last hidden states.

        [hidden_size]: what the final norm gives for each token, rounded to
        `HIDDEN_UNIT`, so that float64 adds them exactly: the sums of a text's parts
        add up to the same bits in any order, and without a ``grid`` for any cut. NaN
        where the model's output is not finite.
        """


# -------------------------------------------------------------------------------------------------
# All sessions' states in a pool of known size: a slot each, so that capacity is an integer.
#
# The backend makes the pool, next to the runner that reads and writes its slots. Nothing above
# sees how a state is stored: it goes in and out as a `StateBlock`.


class StatePool(ABC):
    """``num_slots`` states, each of as many bytes as ``layout`` has. The engine's thread owns it.

    A slot is zeroed when it is allocated: zero is the empty state, and no session can
    meet what another one left. The caller frees each slot that it allocates. Of a state that has
    seen ``position`` tokens the part is copied that these use: `StateLayout.used_bytes`.

    All methods take effect in the order of their calls. A copy to or from memory may complete
    later: reading `StateBlock.data` waits for it, which the engine thread does not do.
    """

    def __init__(self, layout: StateLayout, num_slots: int) -> None:
        assert num_slots > 0, num_slots
        self.layout, self.num_slots, self.state_bytes = layout, num_slots, layout.num_bytes
        self._free = list(range(num_slots))[::-1]
        self._held: set[int] = set()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def allocate(self) -> int | None:
        """A zeroed slot, or None where all are held."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._held.add(slot)
        self.zero(slot)
        return slot

    def free(self, slot: int) -> None:
        assert slot in self._held, slot
        self._held.remove(slot)
        self._free.append(slot)

    @abstractmethod
    def zero(self, slot: int) -> None:
        """Makes the state of ``slot`` the empty one."""

    @abstractmethod
    def read(self, slot: int, position: int) -> StateBlock:
        """A copy of the state as it is now; later steps do not change it."""

    @abstractmethod
    def write(self, slot: int, state: StateBlock) -> None:
        """Makes ``state`` that of ``slot``."""

    @abstractmethod
    def copy(self, source: int, target: int, position: int) -> None:
        """Makes the state of ``source`` that of ``target``, too."""

    @abstractmethod
    def is_finite(self, state: StateBlock) -> bool:
        """Whether ``state`` has finite numbers only: others never become finite again."""

    @abstractmethod
    def spares(self, states: Sequence[tuple[int, int, int]]) -> list[int]:
        """A spare slot for each (slot, position, num_tokens), as the target of its next feed.

        No more than so many tokens are fed. What the spares of the last call held is lost.
        A spare has no past: that of the slot is written, and can be restored.
        Raises `MemoryError` where there is no room; then nothing has changed.
        """

    @abstractmethod
    def swap(self, slot: int, spare: int) -> None:
        """Makes the state of ``spare`` that of ``slot`` and the other way round, without a copy."""

    @abstractmethod
    def restore(self, slot: int) -> None:
        """Makes the past of ``slot`` what it was at the last `spares`, which had the slot."""


# -------------------------------------------------------------------------------------------------
# The state pool in the memory of the host: for the native runtime, and for torch on the CPU.
#
# The address space is reserved at start, so a session never fails for want of it
# later; a page of it takes memory when it is first written. The pages of a bounded past go back to
# the system when a slot is cleared, so that a slot has the memory of its session's text.


Block = npt.NDArray[np.uint8]

#: Whether the system gives zeros for pages that were returned; elsewhere they are written.
RETURNS_PAGES = sys.platform == "linux"


class CpuStatePool(StatePool):
    """See `StatePool`. States are the rows of ``blocks``, [num_slots, num_bytes] uint8.

    What is swapped is the part of fixed size: ``moved`` has it, [fixed_bytes], for slots where it
    is not at the beginning of their row, and for spares. Raises `OSError` where the system has no
    such room.
    """

    def __init__(self, layout: StateLayout, num_slots: int) -> None:
        super().__init__(layout, num_slots)
        size = num_slots * layout.num_bytes
        self._memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        blocks = np.frombuffer(self._memory, np.uint8)
        self.blocks: Block = blocks.reshape(num_slots, layout.num_bytes)
        self.moved: dict[int | None, Block] = {}
        self._num_spares = 0
        self._gaps = layout.gaps()
        self._pasts: dict[int, _Past] = {}  # by slot, of the last `spares`

    def fixed(self, slot: int) -> Block:
        """The state of ``slot`` without its past, [fixed_bytes] uint8."""
        moved = self.moved.get(slot)
        return self.blocks[slot, : self.layout.fixed_bytes] if moved is None else moved

    def zero(self, slot: int) -> None:
        self._clear(slot, 0)

    def read(self, slot: int, position: int) -> StateBlock:
        past = self.blocks[slot, self.layout.fixed_bytes : self.layout.used_bytes(position)]
        return StateBlock(np.concatenate((self.fixed(slot), past)).data)

    def write(self, slot: int, state: StateBlock) -> None:
        fixed, block = self.layout.fixed_bytes, np.frombuffer(state.data, np.uint8)
        self.fixed(slot)[:] = block[:fixed]
        self.blocks[slot, fixed : state.num_bytes] = block[fixed:]
        self._clear(slot, state.num_bytes)

    def copy(self, source: int, target: int, position: int) -> None:
        fixed, used = self.layout.fixed_bytes, self.layout.used_bytes(position)
        self.fixed(target)[:] = self.fixed(source)
        self.blocks[target, fixed:used] = self.blocks[source, fixed:used]
        self._clear(target, used)

    def is_finite(self, state: StateBlock) -> bool:
        return self.layout.is_finite(state.data)

    def spares(self, states: Sequence[tuple[int, int, int]]) -> list[int]:
        while self._num_spares < len(states):
            self.moved[self.num_slots + self._num_spares] = _aligned_zeros(self.layout.fixed_bytes)
            self._num_spares += 1
        self._pasts = {
            slot: _Past(self.layout, self.blocks[slot], position, num_tokens)
            for slot, position, num_tokens in states
        }
        spares = list(range(self.num_slots, self.num_slots + len(states)))
        if len(self._gaps):
            for (slot, *_), spare in zip(states, spares, strict=True):
                self.fixed(spare)[self._gaps] = self.fixed(slot)[self._gaps]
        return spares

    def swap(self, slot: int, spare: int) -> None:
        self.moved[slot], self.moved[spare] = self.moved[spare], self.fixed(slot)

    def restore(self, slot: int) -> None:
        self._pasts[slot].put(self.blocks[slot])

    def _clear(self, slot: int, begin: int) -> None:
        """Zeros from byte ``begin`` on."""
        fixed = self.layout.fixed_bytes
        self.fixed(slot)[begin:] = 0
        begin = max(begin, fixed)
        offset, end = slot * self.state_bytes, (slot + 1) * self.state_bytes
        first = -(-(offset + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if not RETURNS_PAGES or first >= last:
            self.blocks[slot, begin:] = 0
            return
        self.blocks[slot, begin : first - offset] = 0
        self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
        self.blocks[slot, last - offset :] = 0


class _Past:
    """The groups of a past that feeding some tokens writes, as they were in ``block``.

    Of a text that has ``position`` tokens, before at most ``num_tokens`` more.
    """

    def __init__(self, layout: StateLayout, block: Block, position: int, num_tokens: int) -> None:
        used, size, context = (
            layout.used_bytes(position),
            layout.group_bytes,
            layout.num_groups * POSITION_BLOCK,
        )
        self._groups: list[tuple[slice, Block | int]] = []
        if not context:
            return
        places = (place_of(at, context) for at in range(position, position + num_tokens))
        for group in {place // POSITION_BLOCK for place in places}:
            begin = layout.fixed_bytes + group * size
            part = slice(begin, begin + size)
            self._groups.append((part, block[part].copy() if begin < used else 0))

    def put(self, block: Block) -> None:
        """Makes the past in ``block`` again what it was."""
        for part, content in self._groups:
            block[part] = content


def _aligned_zeros(num_bytes: int) -> Block:
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + num_bytes]


# -------------------------------------------------------------------------------------------------
# The native runtime behind the engine's protocol: a step is one call of it.


class NativeRunner:
    """See `Runner`. Any cut of a prompt gives the same bits."""

    grid: tuple[int, ...] = ()

    def __init__(self, runtime: Runtime, pool: CpuStatePool) -> None:
        self._runtime, self._blocks, self._moved = runtime, pool.blocks, pool.moved

    def prepare(self, params: SamplingParams) -> Draw:
        return self._runtime.draw(
            temperature=0.0 if is_greedy(params) else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            typical_p=params.typical_p,
            top_n_sigma=params.top_n_sigma,
            xtc_probability=params.xtc_probability,
            xtc_threshold=params.xtc_threshold,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            dry=params.dry,
            logit_bias=params.logit_bias,
            seed=params.seed,
            logprob=params.logprob,
            top_logprobs=params.top_logprobs,
            penalty_window=PENALTY_WINDOW,
        )

    def run(self, feeds: Sequence[Feed]) -> list[RowOutput]:
        columns = map(list, zip(*feeds, strict=True))
        slots, positions, tokens, draws, recents, allowed, num_draws, wants_logprobs, to = columns
        moved = self._moved
        drawn = self._runtime.run(
            *(self._blocks, slots, positions, tokens, draws),
            recents=recents if any(recents) else None,
            allowed=allowed if any(masks is not None for masks in allowed) else None,
            num_draws=num_draws if any(num > 1 for num in num_draws) else None,
            sources=list(map(moved.get, slots)) if moved else None,
            targets=list(map(moved.get, to)) if moved else None,
        )
        if not any(wants_logprobs):
            return [(tokens, (), ()) for tokens in drawn]
        scores = self._runtime.logprobs(), self._runtime.top_logprobs()
        return list(zip(drawn, *scores, strict=True))

    def hidden(self, first: int, num: int) -> npt.NDArray[np.float32]:
        """What the final norm gave for ``num`` tokens of the last `run`, from ``first`` on."""
        return self._runtime.hidden(first, num)

    def score(self, feed: Feed, following: int, num_top: int = 0) -> list[TokenScore]:
        slot, position, tokens = feed.slot, feed.position, feed.tokens
        row, source = (self._blocks, slot, position, tokens), self._moved.get(slot)
        found = self._runtime.score_top(*row, following, num_top, source)
        return list(map(TokenScore, *found))

    def embed(self, feed: Feed) -> npt.NDArray[np.float64]:
        row = self._blocks, feed.slot, feed.position, feed.tokens
        return self._runtime.embed(*row, self._moved.get(feed.slot))
