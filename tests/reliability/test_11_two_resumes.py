"""11: two resumes of a session at once: one wins, the other gets 409, unless it takes over."""

from __future__ import annotations

import asyncio

from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ServerProcess
from tests.reliability.sites import Site
from tests.reliability.streams import (
    ENDLESS,
    KeptStream,
    answer,
    ask,
    client_of,
    kept_streams,
    place_of,
    run_all,
    socket_of,
    twin_of,
)
from tests.waiting import eventually

NUM_SESSIONS = 8


async def resumed_at(server: ServerProcess, stream: KeptStream) -> KeptStream:
    """Returns at its end, once it was told: while a replica is being reclaimed it is not known."""

    async def was_told() -> bool:
        is_error = await stream.run(server.stream_url) == "error"
        return not is_error or stream.frames[-1]["error"]["code"] != "session_elsewhere"

    await eventually(was_told)
    return stream


async def winner_of(site: Site, pair: tuple[KeptStream, KeptStream]) -> KeptStream:
    """Lets both read, each at another server where there are two, until one is refused.

    The other one, which is then cancelled, is returned: it has all of its session.
    """
    servers = (site.survivors[0], site.survivors[-1])
    running = [
        asyncio.create_task(resumed_at(server, stream))
        for server, stream in zip(servers, pair, strict=True)
    ]
    (first, *_), _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    refused = await first
    (winner,) = set(pair) - {refused}
    assert refused.ends[-1] == "error", refused.frames[-1]
    refusal = refused.frames[-1]
    assert (refusal["status"], refusal["error"]["code"]) == (409, "session_attached")
    await eventually(lambda: bool(winner.resumed))
    await winner.cancel()
    await asyncio.gather(*running)
    assert winner.is_finished, winner.frames[-1]
    return winner


async def test_after_a_crash_one_of_two_wins_and_misses_nothing(site: Site) -> None:
    """The sessions are in the store and have no holder, and both ask for them."""
    history, odometer = History(), Odometer()
    streams = kept_streams(NUM_SESSIONS, history, odometer, max_tokens=ENDLESS)
    running = asyncio.create_task(run_all(streams, site.servers[0].stream_url))
    await odometer.reach(NUM_SESSIONS * 20)
    await site.crash()
    await running
    pairs = [(stream, twin_of(stream, history)) for stream in streams]
    winners = await asyncio.gather(*(winner_of(site, pair) for pair in pairs))
    log = await site.log()
    history.readers = [winner.reader for winner in winners if winner.reader is not None]
    history.check(log)


async def test_second_reader_gets_409_until_it_takes_over(site: Site) -> None:
    history, odometer = History(), Odometer()
    (stream,) = kept_streams(1, history, odometer, max_tokens=ENDLESS)
    first, second = site.servers[0], site.servers[-1]
    reading = asyncio.create_task(stream.run(first.stream_url, "first"))
    await odometer.reach(50)
    path, cursor = f"/v1/sessions/{stream.session}/events", {"starting_after": 0}
    async with client_of(second.url) as client:
        refused = await client.get(path, params=cursor)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_attached")
    place = place_of(stream)
    async with socket_of(second.stream_url) as socket:
        await ask(socket, type="resume", request_id="r", **place)
        refusal = await answer(socket)
        assert (refusal["status"], refusal["error"]["code"]) == (409, "session_attached")
        assert not reading.done()
        await ask(socket, type="resume", request_id="s", take_over=True, **place)
        resumed = await answer(socket)
        assert resumed["type"] == "resumed", resumed
        rival = history.reader("rival", stream.session)
        rival.attach(resumed["epoch"], 0, "second")
        history.held(stream.session, "first", resumed["epoch"], 0)
        history.held(stream.session, "second", resumed["epoch"], resumed["last_seq"])
        while rival.last_seq < resumed["last_seq"] + 100:
            rival.saw_frame(await answer(socket))
        # The first one is told, by an error or by being sent where the session went.
        end = await reading
        assert end in site.ends_of_taken
        assert end == "migrate" or stream.frames[-1]["error"]["code"] == "session_attached"
        assert stream.last_seq <= resumed["last_seq"]
    history.check(await site.log(), complete=False)
