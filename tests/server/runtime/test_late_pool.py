"""A pool whose copies complete later, as on a device: the engine thread waits for none of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from server.engine.runner import CpuStatePool
from server.engine.session import StateBlock
from server.engine.types import Event, TokenEvent
from server.sessions.sessions import Sessions
from server.store.sqlite.store import open_store
from server.store.table_store import StoreLimits
from tests.fakes import FakeEngine
from tests.server.running_engine import driving, request, run
from tests.server.store.records import IDENTITY


class DeviceBlock(StateBlock):
    """A state that only the pool can read, until its copy has come to the host."""

    def __init__(self, on_device: bytes, readers: list[str]) -> None:
        super().__init__(self._wait, len(on_device))
        self.on_device, self._readers = on_device, readers

    def _wait(self) -> bytes:
        self._readers.append(threading.current_thread().name)
        return self.on_device


class LatePool(CpuStatePool):
    """Notes in ``readers`` the threads that have waited for a copy."""

    readers: list[str]

    def read(self, slot: int, position: int) -> StateBlock:
        return DeviceBlock(bytes(super().read(slot, position).data), self.readers)

    def write(self, slot: int, state: StateBlock) -> None:
        super().write(slot, _host_block(state))

    def is_finite(self, state: StateBlock) -> bool:
        return super().is_finite(_host_block(state))


def _host_block(state: StateBlock) -> StateBlock:
    return StateBlock(state.on_device) if isinstance(state, DeviceBlock) else state


async def events_of(pool_class: type[CpuStatePool], path: Path) -> list[Event]:
    """Sessions that hibernate, are saved, evicted, loaded, forked and share a prefix."""
    engine = FakeEngine(
        *(2, 64),
        pool_class=pool_class,
        max_asleep=2,
        can_evict=True,
        save_interval=8,
        max_prefixes=4,
    )
    store = open_store(path, IDENTITY, limits=StoreLimits())
    found: list[Event] = []
    async with driving(engine, store=store) as async_engine:
        sessions = Sessions(async_engine)
        names = [(await sessions.create("me")).session for _ in range(6)]
        for turn in range(3):
            for name in names:
                work: Any = {"session": name, "keep": True, "prompt": f"turn {turn} " * 20}
                found += await run(sessions, request(f"{turn}{name}", 30, **work))
        (fork,) = await sessions.fork(names[0], "me", 1, None)
        found += await run(sessions, request("fork", 30, session=fork.session, keep=True))
        for number in range(2):
            found += await run(sessions, request(f"prefix {number}", 30, "the same text " * 20))
    return found


async def test_engine_thread_waits_for_no_copy(tmp_path: Path) -> None:
    readers: list[str] = []
    late = type("Late", (LatePool,), {"readers": readers})
    found = await events_of(late, tmp_path / "late")
    wanted = await events_of(CpuStatePool, tmp_path / "plain")
    tokens = [event.token_id for event in found if isinstance(event, TokenEvent)]
    assert tokens == [event.token_id for event in wanted if isinstance(event, TokenEvent)]
    assert set(readers) == {"store"}
