"""All sessions' states in one allocation of known size: a slot is a row, capacity an integer.

The address space is reserved at start, so a session never fails for want of it
later; a page of it takes memory when it is first written. A slot is zeroed when
it is handed out: zero is the empty state, and no session can meet what another
one left.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from model.state import StateLayout

Block = npt.NDArray[np.uint8]


class StatePool:
    """``num_slots`` blocks of state: the rows of ``blocks``, [num_slots, num_bytes] uint8.

    The caller frees each slot that it allocates. Raises `OSError` where the system
    has no such room.
    """

    def __init__(self, layout: StateLayout, num_slots: int) -> None:
        assert num_slots > 0, num_slots
        self.layout, self.num_slots = layout, num_slots
        memory = mmap.mmap(-1, num_slots * layout.num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.blocks: Block = np.frombuffer(memory, np.uint8).reshape(num_slots, layout.num_bytes)
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
        self.blocks[slot] = 0
        return slot

    def free(self, slot: int) -> None:
        assert slot in self._held, slot
        self._held.remove(slot)
        self._free.append(slot)

    def block(self, slot: int) -> Block:
        """The slot's bytes, [num_bytes] uint8, sharing the pool's memory."""
        block: Block = self.blocks[slot]
        return block
