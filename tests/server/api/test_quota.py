"""What a tenant may keep: sessions, and the bytes of their logs and states."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.api.keys import ALICE, BOB, bearer, entry
from tests.server.harness import Running, running


@asynccontextmanager
async def serving(folder: Path, **limits: int) -> AsyncIterator[Running]:
    """A server where alice has limits and bob has none."""
    path = folder / "keys.toml"
    scopes = ("generate", "sessions")
    path.write_text(entry("alice", ALICE, *scopes, **limits) + entry("bob", BOB, *scopes))
    async with running(keys_file=path) as server:
        yield server


async def post(server: Running, path: str, key: str = ALICE, **body: Any) -> httpx.Response:
    return await server.http.post(path, json=body, headers=bearer(key))


async def create(server: Running, key: str = ALICE) -> str:
    answer = await post(server, "/v1/sessions", key)
    assert answer.status_code == 200, answer.text
    session: str = answer.json()["session"]
    return session


async def test_every_way_to_keep_one_more_session_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, max_sessions=2) as server:
        session = await create(server)
        await create(server)
        for answer in (
            await post(server, "/v1/sessions"),
            await post(server, f"/v1/sessions/{session}/fork"),
            await post(server, "/v1/completions", prompt="hi", keep=True, max_tokens=1),
        ):
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "rate_limited"
        going_on = {"prompt": "hi", "session": session, "max_tokens": 1}
        assert (await post(server, "/v1/completions", **going_on)).status_code == 200
        assert (await post(server, "/v1/completions", prompt="hi", max_tokens=1)).status_code == 200
        await create(server, BOB)


async def test_deleting_makes_room(tmp_path: Path) -> None:
    async with serving(tmp_path, max_sessions=1) as server:
        session = await create(server)
        await server.http.delete(f"/v1/sessions/{session}", headers=bearer(ALICE))
        await create(server)


@pytest.mark.parametrize("num", [2, 3])
async def test_forks_are_counted_all_at_once(tmp_path: Path, num: int) -> None:
    async with serving(tmp_path, max_sessions=3) as server:
        session = await create(server)
        answer = await post(server, f"/v1/sessions/{session}/fork", n=num)
        assert answer.status_code == (200 if num == 2 else 429)


async def test_stored_bytes_bound_what_is_added(tmp_path: Path) -> None:
    async with serving(tmp_path, max_stored_bytes=2000) as server:
        session = await create(server)
        path, statuses = f"/v1/sessions/{session}/append", []
        while len(statuses) < 100 and 429 not in statuses:
            statuses.append((await post(server, path, text="x" * 200)).status_code)
        assert statuses[0] == 200
        assert statuses[-1] == 429
