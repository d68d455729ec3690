"""Models are loaded and unloaded while the server runs; every stream ends as it should."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import receive, receive_until, send
from tests.server.models.changing import LONG, engines, ids_of, post, serving, statuses
from tests.server.served import ENDLESS
from tests.tiny import write_model

pytestmark = pytest.mark.slow


async def test_loaded_model_is_served_along_with_the_others(tmp_path: Path) -> None:
    write_model(tmp_path / "b", seed=1)
    async with serving(tmp_path) as server:
        before = await server.text()
        answer = await post(server, "", name="second", path="b")
        assert (answer.status_code, answer.json()["id"]) == (200, "second")
        assert await server.text(model="second") != before
        assert await server.text() == before
        assert await statuses(server) == [("a", "serving"), ("second", "serving")]


async def test_server_is_healthy_while_a_model_ends(tmp_path: Path) -> None:
    write_model(tmp_path / "b", seed=1)
    async with serving(tmp_path) as server:
        await post(server, "", name="second", path="b")
        ending = asyncio.create_task(server.models.stop_version(server.version("second")))
        while not ending.done():
            assert server.models.healthy
            assert server.models.takes_sockets
            await asyncio.sleep(0)


async def test_unloaded_model_ends_its_streams_and_frees_threads_and_memory(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "b", seed=1)
    async with serving(tmp_path) as server, server.socket() as socket:
        threads = engines()
        await post(server, "", name="second", path="b")
        body = {"type": "generate", "request_id": "r", "prompt": "Once", "model": "second"}
        await send(socket, **body, **LONG)
        expected = ids_of(await receive_until(socket, "finished"))
        pool = await server.version("second").async_engine.call(
            lambda engine, now: weakref.ref(engine._pool)  # type: ignore[attr-defined]
        )
        await send(socket, **body, **ENDLESS)
        events = await receive_until(socket, "token")
        gone = await server.http.delete("/v1/admin/models/second")
        assert gone.json() == {"id": "second", "object": "model", "deleted": True}
        assert (await server.complete(model="second"))["error"]["code"] == "model_not_found"
        await send(socket, **{**body, "request_id": "late"})
        events += await receive_until(socket, "error")
        assert events[-1]["error"]["code"] == "model_not_found"
        while len(ids_of(events)) < len(expected):
            events.append(await receive(socket))
        assert ids_of(events)[: len(expected)] == expected
        await send(socket, type="cancel", request_id="r")
        await receive_until(socket, "finished")
        await server.retired()
        assert await statuses(server) == [("a", "serving")]
        assert pool() is None
        assert engines() == threads


async def test_kept_sessions_of_an_unloaded_model_are_there_when_it_comes_back(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "b", seed=1)
    async with serving(tmp_path) as server:
        await post(server, "", name="second", path="b")
        session = (await server.complete(model="second", keep=True))["session"]
        await server.http.delete("/v1/admin/models/second")
        await server.retired()
        assert (await server.http.get(f"/v1/sessions/{session}")).status_code == 404
        await post(server, "", name="second", path="b")
        found = (await server.http.get(f"/v1/sessions/{session}")).json()
        assert found["position"] > 20


async def test_stream_that_does_not_end_is_ended_after_the_timeout_and_can_be_resumed(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "b", seed=1)
    async with serving(tmp_path, retire_timeout_s=0.0) as server, server.socket() as socket:
        await post(server, "", name="second", path="b")
        common = {"type": "generate", "prompt": "Once", "model": "second", **ENDLESS}
        await send(socket, request_id="kept", keep=True, **common)
        await send(socket, request_id="other", **common)
        started = await receive(socket)
        await receive_until(socket, "token")
        await server.http.delete("/v1/admin/models/second")
        ends: dict[str, dict[str, Any]] = {}
        while len(ends) < 2:
            event = await receive(socket)
            if event["type"] in ("migrate", "finished"):
                ends[event["request_id"]] = event
        assert ends["kept"]["type"] == "migrate"
        assert ends["other"]["finish_reason"] == "cancelled"
        await server.retired()
        await post(server, "", name="second", path="b")
        session = started["session"] if started["request_id"] == "kept" else ends["kept"]["session"]
        await send(
            socket, type="resume", request_id="again", session=session, last_seq=ends["kept"]["seq"]
        )
        assert (await receive(socket))["type"] == "resumed"
        assert (await receive(socket))["seq"] == ends["kept"]["seq"] + 1


async def test_last_model_cannot_be_unloaded(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        answer = await server.http.delete("/v1/admin/models/a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "last_model")
        assert await server.text()


async def test_default_is_the_next_where_the_first_was_unloaded(tmp_path: Path) -> None:
    write_model(tmp_path / "b", seed=1)
    async with serving(tmp_path) as server:
        await post(server, "", name="second", path="b")
        await server.http.delete("/v1/admin/models/a")
        assert await server.text() == await server.text(model="second")
