"""The state pool in the memory of the host: for the native runtime, and for torch on the CPU.

The address space is reserved at start, so a session never fails for want of it
later; a page of it takes memory when it is first written.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from model.state import StateLayout
from server.engine.state_pool import StatePool
from server.engine.value import StateBlock

Block = npt.NDArray[np.uint8]


class CpuStatePool(StatePool):
    """See `StatePool`. States are the rows of ``blocks``, [num_slots, num_bytes] uint8.

    Raises `OSError` where the system has no such room.
    """

    def __init__(self, layout: StateLayout, num_slots: int) -> None:
        super().__init__(num_slots, layout.num_bytes)
        self.layout = layout
        memory = mmap.mmap(-1, num_slots * layout.num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.blocks: Block = np.frombuffer(memory, np.uint8).reshape(num_slots, layout.num_bytes)
        self._checkpoints = self.blocks[:0]  # a row for each of `_checkpointed`, or more
        self._checkpointed: dict[int, int] = {}  # row by slot

    def zero(self, slot: int) -> None:
        self.blocks[slot] = 0

    def read(self, slot: int) -> StateBlock:
        return StateBlock(self.blocks[slot].tobytes())

    def write(self, slot: int, state: StateBlock) -> None:
        self.blocks[slot] = np.frombuffer(state.data, np.uint8)

    def copy(self, source: int, target: int) -> None:
        self.blocks[target] = self.blocks[source]

    def is_finite(self, state: StateBlock) -> bool:
        return self.layout.is_finite(state.data)

    def checkpoint(self, slots: Sequence[int]) -> None:
        if len(slots) > len(self._checkpoints):
            self._checkpoints = np.empty((len(slots), self.state_bytes), np.uint8)
        self._checkpointed = {slot: row for row, slot in enumerate(slots)}
        for slot, row in self._checkpointed.items():
            self._checkpoints[row] = self.blocks[slot]

    def restore(self, slot: int) -> None:
        self.blocks[slot] = self._checkpoints[self._checkpointed[slot]]
