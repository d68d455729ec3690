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
        self._checkpoints: dict[int, StateBlock] = {}  # by slot

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

    def checkpoint(self, states: Sequence[tuple[int, int]]) -> None:
        self._checkpoints = {slot: self.read(slot, position) for slot, position in states}

    def restore(self, slot: int) -> None:
        self.write(slot, self._checkpoints[slot])

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
