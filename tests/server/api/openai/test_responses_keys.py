"""What a key may do with responses, and what they count for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.api.keys import bearer, entry
from tests.server.api.openai.responding import ASKED, error_of
from tests.server.harness import Running, running

pytestmark = pytest.mark.process

KEY = "key-of-alice"


def keys_file(folder: Path, *scopes: str, **limits: int) -> Path:
    path = folder / "keys.toml"
    path.write_text(entry("alice", KEY, *scopes, **limits), encoding="utf-8")
    return path


async def post(server: Running, **body: Any) -> httpx.Response:
    return await server.http.post("/v1/responses", json={**ASKED, **body}, headers=bearer(KEY))


async def test_key_that_may_only_generate_cannot_store(tmp_path: Path) -> None:
    async with running(keys_file=keys_file(tmp_path, "generate")) as server:
        assert await error_of(await post(server)) == (403, "scope_missing", None)
        answer = await post(server, store=False, previous_response_id="resp_none")
        assert answer.status_code == 403
        named = [{"type": "item_reference", "id": "msg_1"}]
        assert (await post(server, store=False, input=named)).status_code == 403
        assert (await post(server, store=False)).status_code == 200
        answer = await server.http.get("/v1/responses/resp_none", headers=bearer(KEY))
        assert answer.status_code == 403


async def test_each_stored_response_is_one_of_the_tenants_sessions(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "generate", "sessions", max_sessions=2)
    async with running(keys_file=path) as server:
        first = (await post(server)).json()
        assert (await post(server, previous_response_id=first["id"])).status_code == 200
        full = await post(server, previous_response_id=first["id"])
        assert (full.status_code, full.json()["error"]["code"]) == (429, "rate_limited")
        assert (await post(server, store=False)).status_code == 200
        answer = await server.http.delete(f"/v1/responses/{first['id']}", headers=bearer(KEY))
        assert answer.status_code == 200
        assert (await post(server)).status_code == 200
