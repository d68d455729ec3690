"""10, across replicas: one is stopped past its lease, another takes over, the first one wakes."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from tests.chaos.cluster import cluster_of
from tests.chaos.logs import logs_of
from tests.reliability.history import History
from tests.reliability.streams import (
    Frame,
    KeptStream,
    Odometer,
    Soloist,
    answer,
    ask,
    run_all,
    socket_of,
    write_tiny_model,
)

SAMPLING: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
MAX_TOKENS = 10_000
TRIES_S = 30


class Heir:
    """Another client, which resumes a stream's session at the replica that takes over."""

    def __init__(self, stream: KeptStream, history: History) -> None:
        self.stream = stream
        self.taken_over_at = 0
        self._reader = history.reader(f"heir of {stream.name}", stream.session)

    async def read(self, url: str, num_events: int) -> None:
        """Everything from the first event on, until there are so many new ones."""
        async with asyncio.timeout(TRIES_S):
            while True:
                if await self._try(url, num_events):
                    return
                await asyncio.sleep(0.1)

    async def _try(self, url: str, num_events: int) -> bool:
        stream = self.stream
        place = {"session": stream.session, "epoch": stream.epoch, "last_seq": 0}
        async with socket_of(url) as socket:
            await ask(socket, type="resume", request_id="r", **place)
            resumed = await answer(socket)
            if resumed["type"] == "error":
                # The lease is not over yet.
                assert resumed["error"]["code"] == "session_elsewhere", resumed
                return False
            assert resumed["type"] == "resumed", resumed
            self.taken_over_at = resumed["last_seq"]
            self._reader.attach(resumed["epoch"], 0, "second")
            while self._reader.last_seq < self.taken_over_at + num_events:
                self._reader.saw_frame(await answer(socket))
            return True


async def rest_of(socket: ClientConnection) -> list[Frame]:
    """Everything until the server closes."""
    frames = []
    try:
        while True:
            frames.append(json.loads(await socket.recv()))
    except ConnectionClosed:
        return frames


@pytest.mark.timeout(240)
async def test_woken_replica_writes_nothing_sends_nothing_and_leaves(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    body = {"prompt": "Once upon a time", "max_tokens": MAX_TOKENS, **SAMPLING}
    streams = [KeptStream(f"c{seed}", history, odometer, seed=seed, **body) for seed in range(4)]
    async with cluster_of(model, num_replicas=2, wires="direct") as cluster:
        first, second = cluster.replicas
        first.hold()
        reading = asyncio.create_task(run_all(streams, first.process.stream_url, "first"))
        async with socket_of(first.process.stream_url) as bystander:
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
            first.signal(signal.SIGSTOP)
            # Others go on where the first one stands; its own readers hear nothing yet.
            heirs = [Heir(stream, history) for stream in streams]
            await asyncio.gather(*(heir.read(second.process.stream_url, 200) for heir in heirs))
            first.signal(signal.SIGCONT)
            async with asyncio.timeout(TRIES_S):
                await first.ended(0)
            assert first.exits[0].code == 1
            last = (await rest_of(bystander))[-1]
            await reading
        log = await logs_of(cluster, model)
    assert last["type"] in ("token", "error"), last
    for stream in streams:
        assert stream.ends == ["broken"] or stream.frames[-1]["error"]["code"] == "store_taken"
    for heir in heirs:
        (epoch,) = {epoch for session, epoch in log if session == heir.stream.session}
        history.owned(heir.stream.session, "first", epoch, 0)
        history.owned(heir.stream.session, "second", epoch, heir.taken_over_at)
    history.check(log, complete=False)
    soloist = Soloist(model)
    for (session, _), events in log.items():
        (stream,) = [stream for stream in streams if stream.session == session]
        logged = [event.token_id for event in events if event.token_id is not None]
        assert logged == soloist.tokens(**{**stream.body, "max_tokens": len(logged)})


@pytest.mark.timeout(240)
async def test_replica_that_was_stopped_for_less_than_its_lease_loses_nothing(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model")
    history, odometer = History(), Odometer()
    body = {"prompt": "Once upon a time", "max_tokens": 1500, **SAMPLING}
    streams = [KeptStream(f"c{seed}", history, odometer, seed=seed, **body) for seed in range(4)]
    # A lease that no busy machine outlasts.
    environment = {"EVERSTREAM_STORE_LEASE_S": "60"}
    async with cluster_of(
        model, num_replicas=2, wires="direct", environment=environment
    ) as cluster:
        first, second = cluster.replicas
        reading = asyncio.create_task(run_all(streams, first.process.stream_url))
        await odometer.reach(200)
        first.signal(signal.SIGSTOP)
        async with socket_of(second.process.stream_url) as rival:
            (stream, *_) = streams
            place = {"session": stream.session, "epoch": stream.epoch, "last_seq": 0}
            await ask(rival, type="resume", request_id="r", **place)
            refused = await answer(rival)
            assert refused["error"]["code"] == "session_elsewhere"
        first.signal(signal.SIGCONT)
        assert set(await reading) == {"finished"}
        assert not first.exits
        log = await logs_of(cluster, model)
    history.check(log)


@pytest.mark.timeout(240)
async def test_woken_replica_says_nothing_of_sessions_that_it_had(tmp_path: Path) -> None:
    """It is asked before it can know that they have gone on elsewhere."""
    model = write_tiny_model(tmp_path / "model")
    body = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 1, **SAMPLING}
    streams = [KeptStream(f"c{number}", History(), **body) for number in range(8)]
    async with cluster_of(model, num_replicas=2, wires="direct") as cluster, AsyncExitStack() as on:
        first, second = cluster.replicas
        first.hold()
        url = first.process.stream_url
        assert set(await run_all(streams, url)) == {"finished"}
        sockets = [await on.enter_async_context(socket_of(url)) for _ in streams]
        first.signal(signal.SIGSTOP)
        for stream in streams:
            more = {"session": stream.session, "type": "generate", **body}
            last = await last_frame(second.process.stream_url, more)
            assert last["seq"] == 2 * stream.last_seq
        for stream, socket in zip(streams, sockets, strict=True):
            place = {"session": stream.session, "epoch": stream.epoch, "last_seq": last["seq"]}
            await ask(socket, type="resume", request_id="r", **place)
        first.signal(signal.SIGCONT)
        for told in await asyncio.gather(*map(rest_of, sockets)):
            assert all((one["type"], one.get("status")) == ("error", 503) for one in told), told


async def last_frame(url: str, message: dict[str, Any]) -> Frame:
    """The end of a generation, once it is let begin."""
    async with asyncio.timeout(TRIES_S):
        while True:
            async with socket_of(url) as socket:
                await ask(socket, request_id="g", **message)
                while (frame := await answer(socket))["type"] in ("started", "token"):
                    pass
            if frame["type"] == "finished":
                return frame
            assert frame["error"]["code"] == "session_elsewhere", frame
            await asyncio.sleep(0.1)
