"""3: the disk is full: no kept token that is not in the log; the others continue; it recovers."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection

from tests.reliability.confined import inside, volume
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.servers import EVERSTREAM, ServerProcess
from tests.reliability.streams import (
    PROMPT,
    SAMPLING,
    KeptStream,
    answer,
    answer_of,
    ask,
    client_of,
    kept_streams,
    log_over_http,
    run_all,
    socket_of,
    tiny_server,
)
from tests.requirements import needs_namespaces
from tests.waiting import eventually

NUM_STREAMS = 4
SIZE = "64m"


def fill(folder: Path) -> Path:
    """A file that takes all the room there is."""
    filler = folder / "filler"
    block = bytes(4096)
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(block):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return filler


async def check_refuses_what_is_kept(server: ServerProcess, socket: ClientConnection) -> None:
    """New kept work is refused over both ways; unkept work is done."""
    full = (507, "store_full")
    body = {"prompt": PROMPT, "max_tokens": 5, **SAMPLING}
    async with client_of(server.url) as client:
        for path, asked in (("/v1/completions", {**body, "keep": True}), ("/v1/sessions", {})):
            refused = await client.post(path, json=asked)
            assert (refused.status_code, refused.json()["error"]["code"]) == full
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    await ask(socket, type="generate", request_id="k", keep=True, **body)
    frame = await answer(socket)
    assert (frame["status"], frame["error"]["code"]) == full
    await ask(socket, type="generate", request_id="u", **body)
    assert (await answer_of(socket, "finished"))["type"] == "finished"


async def end_all(
    server: ServerProcess, streams: Sequence[KeptStream], odometer: Odometer, history: History
) -> None:
    """All resume, get something more, and are cancelled; nothing is missing then."""
    running = asyncio.create_task(run_all(streams, server.stream_url))
    await odometer.reach(odometer.num_tokens + 400)
    async with client_of(server.url) as client:
        for stream in streams:
            cancelled = await client.post(f"/v1/sessions/{stream.session}/cancel")
            assert cancelled.status_code == 200, cancelled.text
    await running
    assert {stream.ends[-1] for stream in streams} == {"finished"}
    history.check(await log_over_http(server.url, [stream.session for stream in streams]))


async def stop_at_the_log(streams: Sequence[KeptStream], running: asyncio.Task[Any]) -> None:
    """Every stream ends by an error; that nothing unlogged was sent is for the history to say."""
    await running
    for stream in streams:
        last = stream.frames[-1]
        assert (last["type"], last["status"]) == ("error", 507), last
        assert last["error"]["code"] == "store_full"


@needs_namespaces()
async def test_full_file_system(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    history, odometer = History(), Odometer()
    streams = kept_streams(NUM_STREAMS, history, odometer, max_tokens=10**6)
    program = ("tests.reliability.confined", "--tmpfs", str(store), SIZE, *EVERSTREAM)
    with tiny_server(tmp_path, program=program) as server:
        async with socket_of(server.stream_url) as old_socket:
            running = asyncio.create_task(run_all(streams, server.stream_url))
            await odometer.reach(400)
            filler = await asyncio.to_thread(fill, inside(server.pid, store))
            await stop_at_the_log(streams, running)
            assert server.get("/ready")[0] == 503
            assert server.get("/health")[0] == 200
            await check_refuses_what_is_kept(server, old_socket)
            async with socket_of(server.stream_url) as new_socket:
                await check_refuses_what_is_kept(server, new_socket)
            filler.unlink()
            await eventually(lambda: server.get("/ready")[0] == 200)
        await end_all(server, streams, odometer, history)
        assert server.stop() == 0


async def test_store_that_has_all_its_bytes(tmp_path: Path) -> None:
    """It stays red until sessions are deleted, which is still possible."""
    history, odometer = History(), Odometer()
    streams = kept_streams(NUM_STREAMS, history, odometer, max_tokens=10**6)
    with tiny_server(tmp_path, "--store-size", "1MiB") as server:
        async with socket_of(server.stream_url) as old_socket:
            await stop_at_the_log(streams, asyncio.create_task(run_all(streams, server.stream_url)))
            await check_refuses_what_is_kept(server, old_socket)
            # Long enough for the store's upkeep, which must not take it for recovered.
            body = {"prompt": PROMPT, "max_tokens": 20_000, **SAMPLING}
            await ask(old_socket, type="generate", request_id="l", **body)
            assert (await answer_of(old_socket, "finished"))["type"] == "finished"
            assert server.get("/ready")[0] == 503
            assert "works again" not in server.log()
            told = await log_over_http(server.url, [stream.session for stream in streams])
            history.check(told)
            async with client_of(server.url) as client:
                for stream in streams[1:]:
                    deleted = await client.delete(f"/v1/sessions/{stream.session}")
                    assert deleted.status_code == 200, deleted.text
            await eventually(lambda: server.get("/ready")[0] == 200)
        history.readers = [reader for reader in (streams[0].reader,) if reader is not None]
        await end_all(server, streams[:1], odometer, history)
        assert server.stop() == 0


async def keep_session(client: httpx.AsyncClient) -> str:
    """A session that is in the store alone, which takes the room that is left in its files."""
    body = {"prompt": PROMPT, "max_tokens": 5, "keep": True, **SAMPLING}
    answered = await client.post("/v1/completions", json=body)
    assert answered.status_code == 200, answered.text
    return str(answered.json()["session"])


async def check_deletes_alone(client: httpx.AsyncClient, session: str) -> None:
    """Kept work is refused, and continues to be while sessions are deleted."""
    body = {"prompt": PROMPT, "max_tokens": 2000, "keep": True, **SAMPLING}
    for _ in range(2):
        refused = await client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "store_full")
    deleted = await client.delete(f"/v1/sessions/{session}")
    assert deleted.status_code == 200, deleted.text
    refused = await client.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "store_full")


@needs_namespaces()
async def test_volume_that_others_fill_can_be_emptied(tmp_path: Path) -> None:
    """Deletions and a restart have the room of the reserve, which comes back with the disk's."""
    store = tmp_path / "store"
    store.mkdir()
    with (
        volume(store, "16m") as within,
        tiny_server(tmp_path, within=within) as server,
    ):
        reserve = inside(server.pid, store) / "reserve"
        num_bytes = reserve.stat().st_size
        assert num_bytes == 1 << 20
        async with client_of(server.url) as client:
            sessions = [await keep_session(client) for _ in range(3)]
            filler = await asyncio.to_thread(fill, inside(server.pid, store))
            await check_deletes_alone(client, sessions[0])
            await eventually(lambda: server.get("/ready")[0] == 503)
            filler.unlink()
            await eventually(lambda: server.get("/ready")[0] == 200)
            assert reserve.stat().st_size == num_bytes
            await keep_session(client)
        await asyncio.to_thread(fill, inside(server.pid, store))
        server.kill()
        server.launch()
        server.wait_listening()
        reserve = inside(server.pid, store) / "reserve"
        async with client_of(server.url) as client:
            await check_deletes_alone(client, sessions[1])
            found = await client.get(f"/v1/sessions/{sessions[2]}")
            assert found.status_code == 200, found.text
            await eventually(lambda: server.get("/ready")[0] == 503)
            (inside(server.pid, store) / "filler").unlink()
            await eventually(lambda: server.get("/ready")[0] == 200)
            assert reserve.stat().st_size == num_bytes
            await keep_session(client)
        assert server.stop() == 0
