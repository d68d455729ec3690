"""11: two resumes of a session at once: one wins, the other gets 409, unless it takes over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.rivals import winner_of
from tests.reliability.servers import ServerProcess
from tests.reliability.streams import (
    ENDLESS,
    End,
    KeptStream,
    answer,
    ask,
    client_of,
    kept_streams,
    log_over_http,
    place_of,
    run_all,
    socket_of,
    tiny_server,
    twin_of,
)

NUM_SESSIONS = 12


async def test_after_a_crash_one_of_two_wins_and_misses_nothing(tmp_path: Path) -> None:
    """The session sleeps in the store, and both wake it."""
    history, odometer = History(), Odometer()
    streams = kept_streams(NUM_SESSIONS, history, odometer, max_tokens=ENDLESS)
    with tiny_server(tmp_path) as server:
        running = asyncio.create_task(run_all(streams, server.stream_url))
        await odometer.reach(NUM_SESSIONS * 20)
        server.kill()
        await running
        await asyncio.to_thread(server.start)

        def read(stream: KeptStream) -> Awaitable[End]:
            return stream.run(server.stream_url)

        pairs = [(stream, twin_of(stream, history)) for stream in streams]
        winners = await asyncio.gather(*(winner_of(pair, read, read) for pair in pairs))
        log = await log_over_http(server.url, [stream.session for stream in streams])
    history.readers = [winner.reader for winner in winners if winner.reader is not None]
    history.check(log)


async def test_over_http_the_second_reader_gets_409(tmp_path: Path) -> None:
    with ServerProcess("--store", tmp_path / "store") as server:
        (stream,) = kept_streams(1, History(), max_tokens=ENDLESS)
        reading = asyncio.create_task(stream.run(server.stream_url))
        while not stream.frames:  # noqa: ASYNC110 - a stream has no event for its beginning
            await asyncio.sleep(0.01)
        path = f"/v1/sessions/{stream.session}/events"
        async with client_of(server.url) as client:
            refused = await client.get(path, params={"starting_after": 0})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_attached")
        assert not reading.done()
        server.kill()
        await reading


async def test_take_over_continues_reading_and_ends_the_other_reader(tmp_path: Path) -> None:
    history, odometer = History(), Odometer()
    with tiny_server(tmp_path) as server:
        (stream,) = kept_streams(1, history, odometer, max_tokens=ENDLESS)
        reading = asyncio.create_task(stream.run(server.stream_url))
        await odometer.reach(50)
        async with socket_of(server.stream_url) as socket:
            place = place_of(stream)
            await ask(socket, type="resume", request_id="rival", take_over=True, **place)
            resumed = await answer(socket)
            assert resumed["type"] == "resumed"
            rival = history.reader("rival", stream.session)
            rival.attach(resumed["epoch"], 0)
            while rival.last_seq < resumed["last_seq"] + 100:
                rival.saw_frame(await answer(socket))
            assert await reading == "error"
            assert stream.frames[-1]["error"]["code"] == "session_attached"
            assert stream.last_seq <= resumed["last_seq"]
            await ask(socket, type="cancel", request_id="rival")
            while rival.last_seq < (frame := await answer(socket)).get("seq", 0):
                rival.saw_frame(frame)
                if frame["type"] == "finished":
                    break
        log = await log_over_http(server.url, [stream.session])
    history.check(log, complete=False)
