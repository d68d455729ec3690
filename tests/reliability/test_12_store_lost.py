"""12: the store is away for a while, or comes back empty: no client is told what is not so."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path

from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ServerProcess
from tests.reliability.sites import OneServer, Site, all_ready, run_spread
from tests.reliability.soloist import Soloist, check_alone
from tests.reliability.streams import (
    ENDLESS,
    PROMPT,
    SAMPLING,
    KeptStream,
    answer,
    answer_of,
    ask,
    client_of,
    kept_streams,
    run_all,
    socket_of,
    tiny_server,
)
from tests.waiting import eventually

NUM_STREAMS = 4


async def test_sessions_continue_after_the_store_is_back(site: Site, long: bool) -> None:
    """No session continues meanwhile, and afterwards each has one holder again."""
    history, odometer = History(), Odometer()
    streams = kept_streams(NUM_STREAMS, history, odometer, max_tokens=ENDLESS)
    running = asyncio.create_task(run_spread(site, streams))
    await odometer.reach(400)
    await site.take_store()
    await running
    check_lost(streams)
    seen = odometer.num_tokens
    for server in site.servers:
        await check_only_kept_work_is_refused(server)
    await generate_unkept(site.servers[0], 15 if long else 1)
    if isinstance(site, OneServer):
        assert site.servers[0].get("/ready")[0] == 503
    assert odometer.num_tokens == seen
    await site.return_store()
    await all_ready(site)
    await read_on(site, streams)
    check_alone(streams, history, await site.log(), site.model)


async def generate_unkept(server: ServerProcess, num_times: int) -> None:
    """Long enough for the server to look for its store again and again."""
    async with socket_of(server.stream_url) as socket:
        for index in range(num_times):
            body = {"prompt": PROMPT, "max_tokens": 20_000, **SAMPLING}
            await ask(socket, type="generate", request_id=f"u{index}", **body)
            assert (await answer_of(socket, "finished"))["type"] == "finished"


async def read_on(site: Site, streams: list[KeptStream]) -> None:
    """Every stream, at one server after the other, until one continues it and it is cancelled."""

    async def read(index: int, stream: KeptStream) -> None:
        places = itertools.count(index + 1)

        async def is_finished() -> bool:
            place = next(places) % len(site.servers)
            url = site.servers[place].stream_url
            await stream.run(url, f"server {place}", num_tokens=100)
            return stream.is_finished

        await eventually(is_finished)

    await asyncio.gather(*(read(index, stream) for index, stream in enumerate(streams)))


async def test_empty_store_resets_sessions(site: Site) -> None:
    """What a client has of the old one is answered by a reset, at every server."""
    history, odometer = History(), Odometer()
    streams = kept_streams(NUM_STREAMS, history, odometer, max_tokens=ENDLESS)
    running = asyncio.create_task(run_spread(site, streams))
    await odometer.reach(400)
    await site.empty_store()
    await running
    check_lost(streams)  # their work was lost with the store
    await all_ready(site)
    for server in site.servers:
        assert set(await run_all(streams, server.stream_url)) == {"reset"}
        check_reset(streams)
        await check_is_gone(server, streams[0])
    # The new store is as good as any, for all of them alike.
    fresh = [
        KeptStream(f"n{index}", history, prompt=PROMPT, max_tokens=50, seed=index, **SAMPLING)
        for index in range(len(site.servers))
    ]
    for stream, server in zip(fresh, site.servers, strict=True):
        assert await stream.run(server.stream_url) == "finished"
    log = await site.log()
    history.check(log, complete=False)
    assert {session for session, _ in log} == {one.session for one in (*streams, *fresh)}
    soloist = Soloist(site.model)
    for (session, _), events in log.items():
        (stream,) = [one for one in (*streams, *fresh) if one.session == session]
        logged = [event.token_id for event in events if event.token_id is not None]
        assert logged == soloist.tokens(**{**stream.body, "max_tokens": len(logged)})


async def test_store_emptied_while_the_server_was_down_resets_too(tmp_path: Path) -> None:
    odometer = Odometer()
    streams = kept_streams(NUM_STREAMS, History(), odometer, max_tokens=ENDLESS)
    with tiny_server(tmp_path) as server:
        running = asyncio.create_task(run_all(streams, server.stream_url))
        await odometer.reach(400)
        server.kill()
        await running
        shutil.rmtree(tmp_path / "store")
        await asyncio.to_thread(server.start)
        assert set(await run_all(streams, server.stream_url)) == {"reset"}


# What clients are told


def check_lost(streams: Iterable[KeptStream]) -> None:
    """Each was told that its store is lost."""
    for stream in streams:
        last = stream.frames[-1]
        assert (last["type"], last["status"]) == ("error", 503), last


def check_reset(streams: Iterable[KeptStream]) -> None:
    """Each was told that its session is of another store, and is empty in this one."""
    for stream in streams:
        reset = stream.frames[-1]
        assert reset["session"] == stream.session
        assert reset["epoch"].rpartition("-")[0] != stream.epoch.rpartition("-")[0]
        assert (reset["seq"], reset["position"], reset["busy"]) == (0, 0, False)


async def check_is_gone(server: ServerProcess, stream: KeptStream) -> None:
    """Without a cursor there is nothing to reset: it is a session that is not there."""
    async with socket_of(server.stream_url) as socket:
        for message in (
            {"type": "resume", "last_seq": 0},
            {"type": "generate", "prompt": "x", "max_tokens": 2},
        ):
            await ask(socket, request_id="g", session=stream.session, **message)
            assert (await answer(socket))["error"]["code"] == "session_not_found"


async def check_only_kept_work_is_refused(server: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, **SAMPLING}
    async with client_of(server.url) as client:
        refused = await client.post("/v1/completions", json={**body, "keep": True})
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] in ("store_failed", "store_lost")
        assert (await client.post("/v1/completions", json=body)).status_code == 200
