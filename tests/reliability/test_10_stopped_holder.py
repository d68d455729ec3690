"""10: the holder is stopped past its lease, another takes over, the first wakes: it is shut out."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection

from tests.chaos.cluster import cluster_of
from tests.chaos.logs import logs_of
from tests.reliability.history import History, Log
from tests.reliability.odometer import Odometer
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.reliability.sites import LEASE, Site, pause
from tests.reliability.soloist import Soloist
from tests.reliability.streams import (
    ENDLESS,
    SAMPLING,
    Frame,
    KeptStream,
    answer,
    ask,
    kept_streams,
    log_of_store,
    place_of,
    rest_of,
    run_all,
    socket_of,
)
from tests.stopping import stop
from tests.tiny import write_model
from tests.waiting import eventually


class Heir:
    """Another client, which resumes a stream's session at the server that takes over."""

    def __init__(self, stream: KeptStream, history: History) -> None:
        self.stream = stream
        self.taken_over_at = 0
        self._reader = history.reader(f"heir of {stream.name}", stream.session)

    async def read(self, url: str, num_events: int) -> None:
        """Everything from the first event on, until there are so many new ones."""

        async def is_read() -> bool:
            async with socket_of(url) as socket:
                await ask(socket, type="resume", request_id="r", **place_of(self.stream))
                resumed = await answer(socket)
                if resumed["type"] == "error":  # the lease is not over yet
                    assert resumed["error"]["code"] == "session_elsewhere", resumed
                    return False
                assert resumed["type"] == "resumed", resumed
                self.taken_over_at = resumed["last_seq"]
                self._reader.attach(resumed["epoch"], 0, "second")
                while self._reader.last_seq < self.taken_over_at + num_events:
                    self._reader.saw_frame(await answer(socket))
                return True

        await eventually(is_read)


async def endless(socket: ClientConnection) -> None:
    """Has ``socket`` read something that is not kept."""
    body = {"prompt": "hi", "max_tokens": 10**6, **SAMPLING}
    await ask(socket, type="generate", request_id="b", **body)
    assert (await answer(socket))["type"] == "started"


def check_inheritance(heirs: Sequence[Heir], history: History, log: Log, model: Path) -> None:
    """The first holder's readers heard nothing after the second took over, and all is one text."""
    for heir in heirs:
        stream = heir.stream
        assert stream.ends == ["broken"] or stream.frames[-1]["error"]["code"] == "store_taken"
        (epoch,) = {epoch for session, epoch in log if session == stream.session}
        history.held(stream.session, "first", epoch, 0)
        history.held(stream.session, "second", epoch, heir.taken_over_at)
    history.check(log, complete=False)
    soloist = Soloist(model)
    for (session, _), events in log.items():
        (body,) = [heir.stream.body for heir in heirs if heir.stream.session == session]
        logged = [event.token_id for event in events if event.token_id is not None]
        assert logged == soloist.tokens(**{**body, "max_tokens": len(logged)})


@contextmanager
def server_at(folder: Path) -> Iterator[ServerProcess]:
    """Not started."""
    model = folder / "model"
    server = ServerProcess("--model", model, "--store", folder / "store", environment=LEASE)
    try:
        yield server
    finally:
        server.close()


async def test_fenced_holder_writes_nothing_sends_nothing_and_exits(site: Site) -> None:
    history, odometer = History(), Odometer()
    streams = kept_streams(4, history, odometer, max_tokens=ENDLESS)
    url = site.servers[0].stream_url
    reading = asyncio.create_task(run_all(streams, url, holder="first"))
    async with socket_of(url) as bystander:
        await endless(bystander)
        await odometer.reach(400)
        second = await site.stop_first()
        # Others continue where the first one stands; its own readers hear nothing yet.
        heirs = [Heir(stream, history) for stream in streams]
        await asyncio.gather(*(heir.read(second.stream_url, 200) for heir in heirs))
        async with asyncio.timeout(STUCK_S):
            assert await site.wake_first() == 1
        last = (await rest_of(bystander))[-1]
        await reading
    assert last["type"] in ("token", "error"), last
    check_inheritance(heirs, history, await site.log(), site.model)


async def test_holder_stopped_within_a_commit_keeps_the_store(tmp_path: Path) -> None:
    """Locks of the database outlast every lease: the other one gives up, and nothing is lost."""
    model = write_model(tmp_path / "model")
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


def test_store_of_a_living_holder_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    with server_at(tmp_path) as first, server_at(tmp_path) as second:
        first.start()
        pid = first.pid
        second.launch()
        with pytest.raises(AssertionError, match="the server did not start"):
            second.wait_ready()
        assert second.wait() == 2
        assert re.search(rf"process {pid} has the store", second.log())
        assert first.get("/ready")[0] == 200


@pytest.mark.database
async def test_replica_that_was_stopped_for_less_than_its_lease_loses_nothing(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    streams = kept_streams(4, history, odometer, max_tokens=ENDLESS)
    # A lease that no busy machine outlasts.
    environment = {"EVERSTREAM_STORE_LEASE_S": "60"}
    async with cluster_of(
        model, num_replicas=2, wires="direct", environment=environment
    ) as cluster:
        first, second = cluster.replicas
        reading = asyncio.create_task(run_all(streams, first.process.stream_url))
        await odometer.reach(200)
        stop(first.process.pid)
        async with socket_of(second.process.stream_url) as rival:
            (stream, *_) = streams
            await ask(rival, type="resume", request_id="r", **place_of(stream))
            refused = await answer(rival)
            assert refused["error"]["code"] == "session_elsewhere"
        first.signal(signal.SIGCONT)
        for stream in streams:
            await stream.cancel()
        assert set(await reading) == {"finished"}
        assert not first.exits
        log = await logs_of(cluster, model)
    history.check(log)


@pytest.mark.database
async def test_fenced_replica_sends_no_events_of_its_former_sessions(tmp_path: Path) -> None:
    """It is asked before it can know that they have gone on elsewhere."""
    model = write_model(tmp_path / "model")
    body = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 1, **SAMPLING}
    streams = [KeptStream(f"c{number}", History(), **body) for number in range(8)]
    async with cluster_of(model, num_replicas=2, wires="direct") as cluster, AsyncExitStack() as on:
        first, second = cluster.replicas
        first.hold()
        url = first.process.stream_url
        assert set(await run_all(streams, url)) == {"finished"}
        sockets = [await on.enter_async_context(socket_of(url)) for _ in streams]
        stop(first.process.pid)
        for stream in streams:
            more = {"session": stream.session, "type": "generate", **body}
            last = await last_frame(second.process.stream_url, more)
            assert last["seq"] == 2 * stream.last_seq
        for stream, socket in zip(streams, sockets, strict=True):
            place = place_of(stream, last["seq"])
            await ask(socket, type="resume", request_id="r", **place)
        first.signal(signal.SIGCONT)
        for told in await asyncio.gather(*map(rest_of, sockets)):
            assert all((one["type"], one.get("status")) == ("error", 503) for one in told), told


async def last_frame(url: str, message: dict[str, Any]) -> Frame:
    """The end of a generation, once it is let begin."""

    async def last() -> Frame | None:
        async with socket_of(url) as socket:
            await ask(socket, request_id="g", **message)
            while (frame := await answer(socket))["type"] in ("started", "token"):
                pass
        if frame["type"] == "finished":
            return frame
        assert frame["error"]["code"] == "session_elsewhere", frame
        return None

    return await eventually(last)
