"""All sessions' states in one allocation of known size: a slot is a row, capacity an integer.

The memory is reserved at start, so a session never fails for want of it later.
A slot is zeroed when it is handed out: zero is the empty state, and no session
can meet what another one left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.lm import ModelState
from model.state import StateLayout


class StatePool:
    """``num_slots`` blocks of state. The caller frees each slot that it allocates."""

    def __init__(
        self, layout: StateLayout, num_slots: int, device: torch.device | None = None
    ) -> None:
        assert num_slots > 0, num_slots
        self.layout = layout
        self.num_slots = num_slots
        self._blocks = torch.zeros(num_slots, layout.num_bytes, dtype=torch.uint8, device=device)
        self._views = layout.views(self._blocks)
        self._free = list(range(num_slots))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_slots - len(self._free)

    def allocate(self) -> int | None:
        """A zeroed slot, or None where all are held."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._blocks[slot].zero_()
        return slot

    def free(self, slot: int) -> None:
        assert 0 <= slot < self.num_slots and slot not in self._free, slot
        self._free.append(slot)

    def block(self, slot: int) -> Tensor:
        """The slot's bytes, [num_bytes] uint8, sharing the pool's memory."""
        return self._blocks[slot]

    def gather(self, slots: Tensor) -> ModelState:
        """A copy of the states of ``slots`` [B] int64; a single slot is not copied but shared."""
        if len(slots) == 1:
            row = int(slots[0])
            return tuple({n: t[row : row + 1] for n, t in layer.items()} for layer in self._views)
        return tuple(
            {n: t.index_select(0, slots) for n, t in layer.items()} for layer in self._views
        )

    def scatter(self, slots: Tensor, state: ModelState) -> None:
        """Writes the first ``len(slots)`` rows of ``state`` into ``slots`` [B] int64."""
        for views, layer in zip(self._views, state, strict=True):
            for name, tensor in layer.items():
                views[name].index_copy_(0, slots, tensor[: len(slots)])
