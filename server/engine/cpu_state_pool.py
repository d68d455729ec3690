"""The state pool in the memory of the host: for the native runtime, and for torch on the CPU.

The address space is reserved at start, so a session never fails for want of it
later; a page of it takes memory when it is first written. The pages of a bounded past go back to
the system when a slot is cleared, so that a slot has the memory of its session's text.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from model.state import StateLayout
from model.tensor_spec import POSITION_BLOCK
from server.engine.state_pool import StatePool
from server.engine.value import StateBlock

Block = npt.NDArray[np.uint8]

#: Whether the system gives zeros for pages that were returned; elsewhere they are written.
RETURNS_PAGES = sys.platform == "linux"


class CpuStatePool(StatePool):
    """See `StatePool`. States are the rows of ``blocks``, [num_slots, num_bytes] uint8.

    Raises `OSError` where the system has no such room.
    """

    def __init__(self, layout: StateLayout, num_slots: int) -> None:
        super().__init__(layout, num_slots)
        size = num_slots * layout.num_bytes
        self._memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        blocks = np.frombuffer(self._memory, np.uint8)
        self.blocks: Block = blocks.reshape(num_slots, layout.num_bytes)
        self._buffers: list[Block] = []  # of checkpoints, used again each time
        self._checkpoints: dict[int, _Checkpoint] = {}  # by slot

    def zero(self, slot: int) -> None:
        self._clear(slot, 0)

    def read(self, slot: int, position: int) -> StateBlock:
        used = self.layout.used_bytes(position)
        return StateBlock(self.blocks[slot, :used].copy().data)

    def write(self, slot: int, state: StateBlock) -> None:
        self.blocks[slot, : state.num_bytes] = np.frombuffer(state.data, np.uint8)
        self._clear(slot, state.num_bytes)

    def copy(self, source: int, target: int, position: int) -> None:
        used = self.layout.used_bytes(position)
        self.blocks[target, :used] = self.blocks[source, :used]
        self._clear(target, used)

    def is_finite(self, state: StateBlock) -> bool:
        return self.layout.is_finite(state.data)

    def checkpoint(self, states: Sequence[tuple[int, int, int]]) -> None:
        kept = [_Checkpoint.of(self.layout, *state[1:]) for state in states]
        for number, checkpoint in enumerate(kept):
            if number == len(self._buffers):
                self._buffers.append(np.empty(0, np.uint8))
            if len(self._buffers[number]) < checkpoint.num_bytes:
                self._buffers[number] = np.empty(checkpoint.num_bytes, np.uint8)
        for (slot, *_), checkpoint, buffer in zip(states, kept, self._buffers, strict=False):
            checkpoint.take(self.blocks[slot], buffer)
        self._checkpoints = {state[0]: each for state, each in zip(states, kept, strict=True)}

    def restore(self, slot: int) -> None:
        self._checkpoints[slot].put(self.blocks[slot])

    def _clear(self, slot: int, begin: int) -> None:
        """Zeros from byte ``begin`` on."""
        fixed = self.layout.fixed_bytes
        self.blocks[slot, begin:fixed] = 0
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


class _Checkpoint:
    """The parts of a block that feeding some tokens changes: ``copied`` and then zeros again."""

    def __init__(self, copied: tuple[slice, ...], zeros: slice) -> None:
        self._copied, self._zeros = copied, zeros
        self.num_bytes = sum(part.stop - part.start for part in copied)

    @classmethod
    def of(cls, layout: StateLayout, position: int, num_tokens: int) -> _Checkpoint:
        """Of a state that has seen ``position`` tokens, before at most ``num_tokens`` more.

        Until its last group is reached, a past has zeros behind what it uses; then it may slide.
        """
        fixed, used = layout.fixed_bytes, layout.used_bytes(position)
        after = layout.used_bytes(position + num_tokens)
        if position + num_tokens > (layout.num_groups - 1) * POSITION_BLOCK:
            return cls((slice(0, used),), slice(used, after))
        begin = layout.used_bytes(position // POSITION_BLOCK * POSITION_BLOCK)
        return cls((slice(0, fixed), slice(begin, used)), slice(used, after))

    def take(self, block: Block, buffer: Block) -> None:
        """Copies from ``block`` to ``buffer``, which has room for ``num_bytes``."""
        begin = 0
        for part in self._copied:
            end = begin + part.stop - part.start
            buffer[begin:end] = block[part]
            begin = end
        self._buffer = buffer

    def put(self, block: Block) -> None:
        """Makes ``block`` again what it was at `take`."""
        begin = 0
        for part in self._copied:
            end = begin + part.stop - part.start
            block[part] = self._buffer[begin:end]
            begin = end
        block[self._zeros] = 0
