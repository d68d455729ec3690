"""All sessions' states in a pool of known size: a slot each, so that capacity is an integer.

The backend makes the pool, next to the runner that reads and writes its slots. Nothing above
sees how a state is stored: it goes in and out as a `StateBlock`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from model.state import StateLayout
from server.engine.value import StateBlock


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
