"""12: the store is away for a while, or comes back empty: no client is told what is not so."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from tests.reliability.history import History
from tests.reliability.lost_stores import (
    check_lost,
    check_only_kept_work_is_refused,
    check_reset,
)
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ServerProcess, eventually
from tests.reliability.soloist import check_alone
from tests.reliability.streams import (
    ENDLESS,
    PROMPT,
    SAMPLING,
    KeptStream,
    answer,
    answer_of,
    ask,
    events_over_http,
    kept_streams,
    log_of_store,
    run_all,
    socket_of,
    tiny_server,
)

NUM_STREAMS = 4


async def test_sessions_continue_after_the_store_is_back(tmp_path: Path, long: bool) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    history, odometer = History(), Odometer()
    streams = kept_streams(NUM_STREAMS, history, odometer, max_tokens=ENDLESS)
    with tiny_server(tmp_path) as server:
        running = asyncio.create_task(run_all(streams, server.stream_url))
        await odometer.reach(400)
        store.rename(away)
        await running
        check_lost(streams)
        assert server.get("/ready")[0] == 503
        await check_only_kept_work_is_refused(server.url)
        await check_stays_away(server, store, 15 if long else 1)
        away.rename(store)
        await eventually(lambda: server.get("/ready")[0] == 200)
        await run_all(streams, server.stream_url, num_tokens=100)
        assert {stream.ends[-1] for stream in streams} == {"finished"}
        assert server.stop() == 0
    model = tmp_path / "model"
    check_alone(streams, history, log_of_store(store, model), model)


async def check_stays_away(server: ServerProcess, store: Path, num_times: int) -> None:
    """The server looks for its store again and again, and makes no other one in its place."""
    async with socket_of(server.stream_url) as socket:
        for index in range(num_times):
            body = {"prompt": PROMPT, "max_tokens": 20_000, **SAMPLING}
            await ask(socket, type="generate", request_id=f"u{index}", **body)
            assert (await answer_of(socket, "finished"))["type"] == "finished"
            assert not await asyncio.to_thread(store.exists)
    assert server.get("/ready")[0] == 503


async def test_empty_store_resets_sessions(tmp_path: Path) -> None:
    """What a client has of the old one is answered by a reset, and never gone on with."""
    store = tmp_path / "store"
    odometer = Odometer()
    streams = kept_streams(NUM_STREAMS, History(), odometer, max_tokens=ENDLESS)
    with tiny_server(tmp_path) as server:
        running = asyncio.create_task(run_all(streams, server.stream_url))
        await odometer.reach(400)
        store.rename(tmp_path / "away")
        store.mkdir()
        await running
        # Their work was lost with the store, and they were told so.
        check_lost(streams)
        await eventually(lambda: server.get("/ready")[0] == 200)
        assert set(await run_all(streams, server.stream_url)) == {"reset"}
        check_reset(streams)
        await check_is_gone(server, streams[0])
        # The new store is as good as any.
        (again,) = fresh = kept_streams(1, History(), max_tokens=50)
        assert await run_all(fresh, server.stream_url) == ["finished"]
        server.restart()
        assert len(await events_over_http(server.url, again.session)) == 52
        assert set(await run_all(streams, server.stream_url)) == {"reset"}
        assert server.stop() == 0


async def check_is_gone(server: ServerProcess, stream: KeptStream) -> None:
    """Without a cursor there is nothing to reset: it is a session that is not there."""
    async with socket_of(server.stream_url) as socket:
        for message in (
            {"type": "resume", "last_seq": 0},
            {"type": "generate", "prompt": "x", "max_tokens": 2},
        ):
            await ask(socket, request_id="g", session=stream.session, **message)
            assert (await answer(socket))["error"]["code"] == "session_not_found"


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
