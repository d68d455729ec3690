"""The named states of one model: what the operator gave at start, and what the store keeps.

All of it belongs to the event loop. A state that is in use is in memory; sessions that
have begun with it share that memory until they run, and depend on nothing here afterwards.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from server.engine.session import SessionValue
from server.errors import RequestError
from server.runtime.async_engine import AsyncEngine
from server.store.base import Identity, ImportRefused, StoreError
from server.store.portable import NamedState, export_state, import_state

#: Of states that the store keeps, those used last stay in memory, up to so many bytes.
MAX_CACHED_BYTES = 256 << 20

#: A state out of the bytes of a file. Raises `ImportRefused` and `SnapshotMismatch`.
Read = Callable[[bytes], NamedState]


class StateNotFound(RequestError):
    """No state of this name."""

    code = "state_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"state: there is no state {name}", "state")


class TooManyStates(RequestError):
    """As many states as the operator allows."""

    code = "too_many_states"

    def __init__(self, max_states: int) -> None:
        super().__init__(f"name: the model has its {max_states} states; delete one first", "name")


class StateFixed(RequestError):
    """A state that --state or the model's own file gave: it is changed where it was given."""

    code = "state_fixed"

    def __init__(self, name: str) -> None:
        super().__init__(f"name: the state {name} was given at start", "name")


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What is known of a state without loading it. ``fixed``: it was given at start."""

    name: str
    digest: str
    fixed: bool


class NamedStates:
    """``fixed`` are the states given at start; the store has at most ``max_states`` more."""

    def __init__(
        self,
        async_engine: AsyncEngine,
        identity: Identity,
        fixed: Mapping[str, NamedState],
        max_states: int,
        read: Read | None = None,
    ) -> None:
        self._async_engine, self._identity, self._fixed = async_engine, identity, dict(fixed)
        self._max_states = max_states
        self._read: Read = read or (lambda data: import_state(data, identity))
        self._cached: OrderedDict[str, NamedState] = OrderedDict()

    async def start_of(self, name: str) -> SessionValue:
        """What a session begins with. Raises `StateNotFound`, or an error of the store."""
        return (await self.find(name)).value

    async def find(self, name: str) -> NamedState:
        """The state called ``name``; see `start_of`.

        Raises `SnapshotMismatch` where the store has it from another backend or dtype.
        """
        if name in self._fixed:
            return self._fixed[name]
        digests = await self._async_engine.ask_store(lambda store: store.named_states())
        if name not in digests:
            raise StateNotFound(name)
        if (state := self._cached.get(digests[name])) is None:
            data = await self._async_engine.ask_store(lambda store: store.read_named(name))
            if data is None:  # deleted meanwhile
                raise StateNotFound(name)
            state = await asyncio.to_thread(_stored, data, self._identity, name)
        self._keep(state)
        return state

    async def listed(self) -> list[StateInfo]:
        """All of them by name."""
        stored = await self._async_engine.ask_store(lambda store: store.named_states())
        found = {name: StateInfo(name, digest, False) for name, digest in stored.items()}
        found |= {name: StateInfo(name, s.digest, True) for name, s in self._fixed.items()}
        return [info for _, info in sorted(found.items())]

    async def put(self, name: str, data: bytes) -> NamedState:
        """Keeps the state in a file under ``name``, in the place of one that has it.

        Raises `ImportRefused`, `SnapshotMismatch`, `TooManyStates`, `StateFixed`, `StoreError`.
        """
        self._check_free(name)
        state = await asyncio.to_thread(self._read, data)
        digests = await self._async_engine.ask_store(lambda store: store.named_states())
        if name not in digests and len(digests) >= self._max_states:
            raise TooManyStates(self._max_states)
        parts = export_state(state, self._identity)
        await self._async_engine.ask_store(lambda store: store.put_named(name, state.digest, parts))
        self._keep(state)
        return state

    async def delete(self, name: str) -> None:
        """Sessions that have begun with it continue. Raises `StateNotFound` and `StateFixed`."""
        self._check_free(name)
        if not await self._async_engine.ask_store(lambda store: store.drop_named(name)):
            raise StateNotFound(name)

    async def export(self, name: str) -> bytes:
        """The file of a state. Raises as `find`."""
        state = await self.find(name)
        return await asyncio.to_thread(lambda: b"".join(export_state(state, self._identity)))

    def _check_free(self, name: str) -> None:
        if name in self._fixed:
            raise StateFixed(name)

    def _keep(self, state: NamedState) -> None:
        """In memory, with those that were used last; the newest stays, however large."""
        self._cached[state.digest] = state
        self._cached.move_to_end(state.digest)
        num_bytes = sum(map(_size, self._cached.values()))
        while len(self._cached) > 1 and num_bytes > MAX_CACHED_BYTES:
            num_bytes -= _size(self._cached.popitem(last=False)[1])


def _size(state: NamedState) -> int:
    block = state.value.state
    return 0 if block is None else block.num_bytes


def _stored(data: bytes, identity: Identity, name: str) -> NamedState:
    try:
        return import_state(data, identity)
    except ImportRefused as error:  # it was good when it was put there
        raise StoreError(f"the state {name} is broken: {error.message}", "state") from error
