"""Quotas of a tenant while many of its requests come at the same moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import sse
from tests.reliability.servers import STUCK_S
from tests.server.api.keys import ALICE, bearer, entry
from tests.server.api.test_quota import create, post, serving
from tests.server.harness import Running, running

KEY = bearer(ALICE)
NUM = 41


async def num_sessions(server: Running) -> int:
    answer = await server.http.get("/v1/sessions", params={"limit": 1000}, headers=KEY)
    return len(answer.json()["data"])


async def ways(server: Running, session: str, index: int) -> httpx.Response:
    """One more session, by one of the ways to keep one."""
    if index % 3 == 0:
        return await post(server, "/v1/sessions")
    if index % 3 == 1:
        return await post(server, f"/v1/sessions/{session}/fork")
    return await post(server, "/v1/completions", prompt="hi", keep=True, max_tokens=1)


async def test_concurrently_created_sessions_stay_within_the_limit(tmp_path: Path) -> None:
    async with serving(tmp_path, max_sessions=5) as server:
        session = await create(server)
        answers = await asyncio.gather(*(ways(server, session, index) for index in range(NUM)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 4 + [429] * (NUM - 4)
        assert await num_sessions(server) == 5


async def test_disconnecting_clients_do_not_exceed_the_limit(tmp_path: Path) -> None:
    async with serving(tmp_path, max_sessions=5) as server:
        session = await create(server)
        asking = [asyncio.create_task(ways(server, session, index)) for index in range(NUM)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.gather(*(ways(server, session, index) for index in range(NUM)))
        assert await num_sessions(server) <= 5


@asynccontextmanager
async def of_one_stream(folder: Path, **settings: Any) -> AsyncIterator[Running]:
    """A server where alice may run one request."""
    path = folder / "keys.toml"
    path.write_text(entry("alice", ALICE, "generate", "sessions", max_running=1))
    async with running(keys_file=path, **settings) as server:
        yield server


async def parked_session(server: Running) -> str:
    """One whose request has no reader and is parked for that."""
    body = {"prompt": "a", "keep": True, "max_tokens": 10**6, "stream": True}
    async with server.http.stream("POST", "/v1/completions", json=body, headers=KEY) as answer:
        assert answer.status_code == 200, await answer.aread()
        first = await anext(sse.read(answer.aiter_bytes()))
        session = str(first.value["session"])
    async with asyncio.timeout(STUCK_S):
        while not (await info(server, session))["parked"]:
            pass
    return session


async def info(server: Running, session: str) -> dict[str, Any]:
    answer = await server.http.get(f"/v1/sessions/{session}", headers=KEY)
    found: dict[str, Any] = answer.json()
    return found


async def test_parked_streams_do_not_all_resume(tmp_path: Path) -> None:
    async with of_one_stream(tmp_path, max_detached_tokens=0) as server:
        sessions = [await parked_session(server) for _ in range(3)]
        url = "/v1/sessions/{}/events"
        async with server.http.stream("GET", url.format(sessions[0]), headers=KEY) as reading:
            assert reading.status_code == 200
            await anext(reading.aiter_lines())
            for session in sessions[1:]:
                refused = await server.http.get(url.format(session), headers=KEY)
                assert refused.status_code == 429, refused.text
                assert "max_running" in refused.json()["error"]["message"]
        async with asyncio.timeout(STUCK_S):
            while not (await info(server, sessions[0]))["parked"]:
                pass
        async with server.http.stream("GET", url.format(sessions[1]), headers=KEY) as reading:
            assert reading.status_code == 200


async def test_stream_whose_reader_is_slow_counts(tmp_path: Path) -> None:
    """It continues as soon as its client reads."""
    body = json.dumps({"prompt": "a", "max_tokens": 10**6, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {KEY['authorization']}\r\n"
    async with of_one_stream(tmp_path, max_queued_events=16) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        async with asyncio.timeout(STUCK_S):
            while (await server.stats()).num_parked == 0:
                pass
        refused = await post(server, "/v1/completions", prompt="a", max_tokens=1)
        writer.transport.abort()
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limited"


@pytest.mark.parametrize("limit", [0, 1])
async def test_limit_is_exact_for_small_values(tmp_path: Path, limit: int) -> None:
    async with serving(tmp_path, max_sessions=limit) as server:
        answers = await asyncio.gather(*(post(server, "/v1/sessions") for _ in range(8)))
        assert [answer.status_code for answer in answers].count(200) == limit
