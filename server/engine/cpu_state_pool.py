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

from model.architectures.bounded import place_of
from model.state import ALIGNMENT, StateLayout
from model.tensor_spec import POSITION_BLOCK
from server.engine.state_pool import StatePool
from server.engine.value import StateBlock

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
