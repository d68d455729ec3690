"""10: the owner is stopped past its lease, another takes over, the first wakes: it is shut out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.reliability.heirs import Heir, check_inheritance, endless
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ServerProcess, eventually
from tests.reliability.streams import (
    ENDLESS,
    kept_streams,
    log_of_store,
    rest_of,
    run_all,
    socket_of,
    write_tiny_model,
)

#: Above the interval in which an owner shows that it lives.
LEASE = {"EVERSTREAM_STORE_LEASE_S": "4"}


@contextmanager
def server_at(folder: Path) -> Iterator[ServerProcess]:
    """Not started."""
    model = folder / "model"
    server = ServerProcess("--model", model, "--store", folder / "store", environment=LEASE)
    try:
        yield server
    finally:
        server.close()


def is_committing(pid: int) -> bool:
    """Whether the process has a lock that SQLite takes for a transaction: bytes 120 to 127."""
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(
        kind == "POSIX" and int(holder) == pid and 120 <= int(first) <= 127
        for _, kind, _, _, holder, _, first, _ in (lock for lock in locks if len(lock) == 8)
    )


def is_stopped(pid: int) -> bool:
    """Whether all of its threads stand still."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)


async def pause(server: ServerProcess, within_a_commit: bool) -> None:
    """Stops it, within a commit or where another process can write."""
    while True:
        server.pause()
        await eventually(lambda: is_stopped(server.pid))
        if is_committing(server.pid) == within_a_commit:
            return
        server.go_on()
        await asyncio.sleep(0.001)


async def test_fenced_owner_writes_nothing_sends_nothing_and_exits(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    streams = kept_streams(4, history, odometer, max_tokens=ENDLESS)
    with server_at(tmp_path) as first, server_at(tmp_path) as second:
        first.start()
        reading = asyncio.create_task(run_all(streams, first.stream_url, owner="first"))
        async with socket_of(first.stream_url) as bystander:
            await endless(bystander)
            await odometer.reach(400)
            await pause(first, within_a_commit=False)
            await asyncio.to_thread(second.start)
            # Others continue where the first one stands; its own readers hear nothing yet.
            heirs = [Heir(stream, history) for stream in streams]
            await asyncio.gather(*(heir.read(second.stream_url, 200) for heir in heirs))
            first.go_on()
            assert await asyncio.to_thread(first.wait) == 1
            last = (await rest_of(bystander))[-1]
            await reading
    assert last["type"] in ("token", "error"), last
    check_inheritance(heirs, history, log_of_store(tmp_path / "store", model), model)


async def test_owner_stopped_within_a_commit_keeps_the_store(tmp_path: Path) -> None:
    """Locks of the database outlast every lease: the other one gives up, and nothing is lost."""
    model = write_tiny_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    streams = kept_streams(4, history, odometer, max_tokens=ENDLESS)
    with server_at(tmp_path) as first, server_at(tmp_path) as second:
        first.start()
        reading = asyncio.create_task(run_all(streams, first.stream_url))
        await odometer.reach(400)
        await pause(first, within_a_commit=True)
        second.launch()
        assert await asyncio.to_thread(second.wait) == 2
        first.go_on()
        for stream in streams:
            await stream.cancel()
        assert set(await reading) == {"finished"}
        assert first.stop() == 0
    history.check(log_of_store(tmp_path / "store", model))


def test_store_of_a_living_owner_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    with server_at(tmp_path) as first, server_at(tmp_path) as second:
        first.start()
        pid = first.pid
        second.launch()
        with pytest.raises(AssertionError, match="the server did not start"):
            second.wait_ready()
        assert second.wait() == 2
        assert re.search(rf"process {pid} has the store", second.log())
        assert first.get("/ready")[0] == 200
