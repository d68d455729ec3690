"""10: the owner is stopped past its lease, another takes over, the first wakes: it is shut out."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from tests.reliability.history import History
from tests.reliability.servers import ServerProcess, eventually
from tests.reliability.streams import (
    Frame,
    KeptStream,
    Odometer,
    Soloist,
    answer,
    ask,
    log_of_store,
    run_all,
    socket_of,
    write_tiny_model,
)

SAMPLING: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
#: Above the interval in which an owner shows that it lives.
LEASE = {"EVERSTREAM_STORE_LEASE_S": "4"}
MAX_TOKENS = 20_000


@contextmanager
def server_at(folder: Path) -> Iterator[ServerProcess]:
    """Not started."""
    model = folder / "model"
    server = ServerProcess("--model", model, "--store", folder / "store", environment=LEASE)
    try:
        yield server
    finally:
        server.__exit__(None, None, None)


async def rest_of(socket: ClientConnection) -> list[Frame]:
    """Everything until the server closes."""
    frames = []
    try:
        while True:
            frames.append(json.loads(await socket.recv()))
    except ConnectionClosed:
        return frames


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


async def test_woken_owner_writes_nothing_sends_nothing_and_leaves(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    body = {"prompt": "Once upon a time", "max_tokens": MAX_TOKENS, **SAMPLING}
    streams = [KeptStream(f"c{seed}", history, odometer, seed=seed, **body) for seed in range(4)]
    with server_at(tmp_path) as first, server_at(tmp_path) as second:
        first.start()
        reading = asyncio.create_task(run_all(streams, first.stream_url, "first"))
        async with socket_of(first.stream_url) as bystander:
            await ask(
                bystander,
                type="generate",
                request_id="b",
                prompt="hi",
                max_tokens=10**6,
                **SAMPLING,
            )
            assert (await answer(bystander))["type"] == "started"
            await odometer.reach(400)
            await pause(first, within_a_commit=False)
            await asyncio.to_thread(second.start)
            # Others go on where the first one stands; its own readers hear nothing yet.
            heirs = [Heir(stream, history) for stream in streams]
            await asyncio.gather(*(heir.read(second.stream_url, 200) for heir in heirs))
            first.go_on()
            assert await asyncio.to_thread(first.wait) == 1
            last = (await rest_of(bystander))[-1]
            await reading
    assert last["type"] in ("token", "error"), last
    for stream in streams:
        assert stream.ends == ["broken"] or stream.frames[-1]["error"]["code"] == "store_taken"
    kept = log_of_store(tmp_path / "store", model)
    for heir in heirs:
        (epoch,) = {epoch for session, epoch in kept if session == heir.stream.session}
        history.owned(heir.stream.session, "first", epoch, 0)
        history.owned(heir.stream.session, "second", epoch, heir.taken_over_at)
    history.check(kept, complete=False)
    soloist = Soloist(model)
    for (session, _), events in kept.items():
        (stream,) = [stream for stream in streams if stream.session == session]
        logged = [event.token_id for event in events if event.token_id is not None]
        wanted = soloist.tokens(**{**stream.body, "max_tokens": len(logged)})
        assert logged == wanted


class Heir:
    """Another client, which resumes a stream's session on the server that took over."""

    def __init__(self, stream: KeptStream, history: History) -> None:
        self.stream = stream
        self.taken_over_at = 0
        self._reader = history.reader(f"heir of {stream.name}", stream.session)

    async def read(self, url: str, num_events: int) -> None:
        """Everything from the first event on, until there are so many new ones."""
        stream = self.stream
        async with socket_of(url) as socket:
            await ask(
                socket,
                type="resume",
                request_id="r",
                session=stream.session,
                epoch=stream.epoch,
                last_seq=0,
            )
            resumed = await answer(socket)
            assert resumed["type"] == "resumed", resumed
            self.taken_over_at = resumed["last_seq"]
            self._reader.attach(resumed["epoch"], 0, "second")
            while self._reader.last_seq < self.taken_over_at + num_events:
                self._reader.saw_frame(await answer(socket))


async def test_owner_stopped_within_a_commit_keeps_the_store(tmp_path: Path) -> None:
    """Locks of the database outlast every lease: the other one gives up, and nothing is lost."""
    model = write_tiny_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    body = {"prompt": "Once upon a time", "max_tokens": 3000, **SAMPLING}
    streams = [KeptStream(f"c{seed}", history, odometer, seed=seed, **body) for seed in range(4)]
    with server_at(tmp_path) as first, server_at(tmp_path) as second:
        first.start()
        reading = asyncio.create_task(run_all(streams, first.stream_url))
        await odometer.reach(400)
        await pause(first, within_a_commit=True)
        second.launch()
        assert await asyncio.to_thread(second.wait, 60) == 2
        first.go_on()
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
