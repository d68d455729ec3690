"""Models are reloaded while the server runs, and no stream is dropped."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import save_checkpoint
from server.errors import SessionNotFound
from tests.server.harness import receive, receive_until, send
from tests.server.models.changing import (
    LONG,
    engines,
    ids_of,
    old_version_running,
    post,
    reload,
    serving,
    statuses,
)
from tests.server.served import ENDLESS, served
from tests.tiny import tiny_checkpoint, write_model

pytestmark = pytest.mark.slow


async def test_reload_sends_new_work_to_new_weights_and_old_streams_end_with_the_same_bits(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as server, server.socket() as socket:
        body = {"type": "generate", "prompt": "Once"}
        await send(socket, request_id="old", **body, **LONG)
        old = ids_of(await receive_until(socket, "finished"), "old")
        for name in ("one", "kept"):
            await send(socket, request_id=name, keep=name == "kept", **body, **ENDLESS)
        seen = await receive_until(socket, "token")
        write_model(tmp_path / "a", seed=1)
        answer = await reload(server)
        assert answer["changed"] is True
        new = await server.text("Once", **LONG)
        assert answer["model"]["everstream"]["digest"] == (server.version("a").service.model.digest)
        await send(socket, request_id="new", **body, **LONG)
        seen += await receive_until(socket, "finished")
        assert seen[-1]["request_id"] == "new"
        assert "".join(e.get("text", "") for e in seen if e["request_id"] == "new") == new
        assert ids_of(seen, "new") != old
        assert await statuses(server) == [("a", "serving"), ("a", "retiring")]
        while min(len(ids_of(seen, name)) for name in ("one", "kept")) < len(old):
            seen += await receive_until(socket, "token")
        for name in ("one", "kept"):
            assert ids_of(seen, name)[: len(old)] == old
            await send(socket, type="cancel", request_id=name)
            await receive_until(socket, "finished")
        await server.retired()
        assert await statuses(server) == [("a", "serving")]


async def test_old_version_is_freed(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        threads = engines()
        pool = await server.version("a").async_engine.call(
            lambda engine, now: weakref.ref(engine._pool)  # type: ignore[attr-defined]
        )
        for seed in (1, 2, 3):
            write_model(tmp_path / "a", seed)
            await reload(server)
            await server.retired()
        assert pool() is None
        assert engines() == threads


async def test_running_session_can_be_read_again_after_a_reload(tmp_path: Path) -> None:
    """Its client loses the connection, and comes back while the old version still runs it."""
    async with serving(tmp_path) as server:
        async with server.socket() as socket:
            await send(socket, type="generate", request_id="r", prompt="Once", keep=True, **ENDLESS)
            session = (await receive(socket))["session"]
            await receive_until(socket, "token")
            write_model(tmp_path / "a", seed=1)
            await reload(server)
        async with server.socket() as socket:
            await send(socket, type="resume", request_id="r", session=session, last_seq=0)
            assert (await receive(socket))["type"] == "resumed"
            events = await receive_until(socket, "token")
            assert events[-1]["seq"] == 1
            await server.http.post(f"/v1/sessions/{session}/cancel")
            await receive_until(socket, "finished")
        await server.retired()


async def test_session_of_other_weights_is_409_until_they_are_reloaded(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as server:
        expected = await server.complete(keep=True)
        kept = await server.complete(keep=True)
        expected = await server.text(session=expected["session"])
        session = kept["session"]
        shutil.copytree(tmp_path / "a", tmp_path / "before")
        write_model(tmp_path / "a", seed=1)
        await reload(server)
        await server.retired()
        again = await server.http.post(
            "/v1/completions", json={"prompt": "x", "session": session, "max_tokens": 1}
        )
        fork = await server.http.post(f"/v1/sessions/{session}/fork")
        info = await server.http.get(f"/v1/sessions/{session}")
        for answer in (again, fork, info):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (409, "snapshot_mismatch")
            assert "another version" in error["message"]
        new = (await server.complete(keep=True))["session"]
        await reload(server, path="before")
        await server.retired()
        assert await server.text(session=session) == expected
        assert (await server.http.get(f"/v1/sessions/{new}")).status_code == 409


async def test_session_of_an_old_version_is_refused_while_that_runs_others(
    tmp_path: Path,
) -> None:
    """Its owner hears that it rests, and anybody else that there is none."""
    async with serving(tmp_path) as server:
        idle = (await server.complete(keep=True))["session"]
        async with old_version_running(server, tmp_path):
            answer = await server.complete(session=idle)
            assert answer["error"]["code"] == "snapshot_mismatch"
            assert await statuses(server) == [("a", "serving"), ("a", "retiring")]
            assert await server.text()
            for name in (None, "a"):
                service = await server.models.holding(idle, "another", name)
                with pytest.raises(SessionNotFound):
                    await service.sessions.info(idle, "another")
                with pytest.raises(SessionNotFound):
                    await service.sessions.fork(idle, "another", 1, None)


async def test_versions_find_their_sessions_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        old = (await server.complete(keep=True))["session"]
        write_model(tmp_path / "a", seed=1)
        await reload(server)
        new = (await server.complete(keep=True))["session"]
        await server.retired()
    for seed, found, elsewhere in ((0, old, new), (1, new, old)):
        write_model(tmp_path / "a", seed)
        async with served(str(tmp_path / "a"), store=str(tmp_path / "store")) as server:
            assert (await server.http.get(f"/v1/sessions/{found}")).status_code == 200
            assert (await server.http.get(f"/v1/sessions/{elsewhere}")).status_code == 409


async def test_same_weights_keep_their_engine_and_sessions(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, server.socket() as socket:
        async_engine = server.version("a").async_engine
        session = (await server.complete(keep=True))["session"]
        await send(socket, type="generate", request_id="r", prompt="Once", **ENDLESS)
        await receive_until(socket, "token")
        (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages[0].content }}!")
        assert (await reload(server))["changed"] is False
        assert server.version("a").async_engine is async_engine
        assert server.version("a").service.chat_template.source.endswith("!")
        assert (await server.complete(session=session))["choices"]
        await send(socket, type="cancel", request_id="r")
        await receive_until(socket, "finished")


async def test_reload_to_a_version_that_still_ends_is_refused_for_now(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        shutil.copytree(tmp_path / "a", tmp_path / "before")
        async with old_version_running(server, tmp_path):
            answer = await post(server, "/a/reload", path="before")
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_in_use")
        assert (await reload(server, path="before"))["changed"] is True


async def test_counters_do_not_decrease_at_a_reload(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        await server.text()
        write_model(tmp_path / "a", seed=1)
        await reload(server)
        await server.retired()
        await server.text()
        lines = (await server.http.get("/metrics")).text.splitlines()
        assert 'everstream_tokens_total{kind="completion",model="a"} 40.0' in lines
        assert 'everstream_requests_total{finish_reason="length",model="a"} 2.0' in lines
        assert 'everstream_slots{model="a",state="total"} 8.0' in lines


async def test_request_that_has_begun_before_a_reload_is_taken_after_it(tmp_path: Path) -> None:
    """Its version waits for it, though it had nothing to do meanwhile."""
    async with serving(tmp_path) as server:
        expected = await server.text("Once", **LONG)
        service = server.version("a").service
        with service.async_engine.use():
            write_model(tmp_path / "a", seed=1)
            await reload(server)
            assert await statuses(server) == [("a", "serving"), ("a", "retiring")]
            async with server.socket() as socket:
                await send(socket, type="generate", request_id="r", prompt="Once", **LONG)
                await receive_until(socket, "finished")
            assert server.models.retiring
        await server.retired()
        assert await server.text("Once", **LONG) != expected


async def test_server_stops_in_the_middle_of_a_retirement(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, server.socket() as socket:
        await send(socket, type="generate", request_id="r", prompt="Once", keep=True, **ENDLESS)
        await receive_until(socket, "token")
        write_model(tmp_path / "a", seed=1)
        await reload(server)
    write_model(tmp_path / "a")
    async with served(str(tmp_path / "a"), store=str(tmp_path / "store")) as server:
        (session,) = (await server.http.get("/v1/sessions")).json()["data"]
        assert session["busy"]


async def test_bigger_checkpoint_takes_the_place_of_a_smaller_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        other = tiny_checkpoint("retnet", seed=3)
        save_checkpoint(tmp_path / "a", other.model, other.tokenizer)
        answer = await reload(server)
        assert answer["model"]["everstream"]["attention"] == "retnet"
        assert await server.text()


async def test_session_on_an_old_version_does_not_exist_for_other_tenants(tmp_path: Path) -> None:
    """Where its owner was told 409 or 200, others were told 409 as well."""
    settings: dict[str, Any] = {"admin_keys": ("alice",), "api_keys": ("bob",)}
    write_model(tmp_path / "a")
    async with served(
        str(tmp_path / "a"), store=str(tmp_path / "store"), model_dir=tmp_path, **settings
    ) as server:
        alice, bob = ({"authorization": f"Bearer {key}"} for key in ("alice", "bob"))
        async with server.socket(additional_headers=alice) as socket:
            work = {"type": "generate", "request_id": "r", "prompt": "Once", "keep": True}
            await send(socket, **work, **ENDLESS)
            (started, *_) = await receive_until(socket, "token")
            write_model(tmp_path / "a", seed=1)
            reloaded = await server.http.post("/v1/admin/models/a/reload", headers=alice, json={})
            assert reloaded.json()["changed"]
            url = f"/v1/sessions/{started['session']}"
            assert (await server.http.get(url, headers=alice)).status_code == 200
            for method, rest in (("GET", ""), ("POST", "/fork"), ("DELETE", "")):
                seen = []
                for place in (url, f"/v1/sessions/sess_{1:032x}"):
                    answer = await server.http.request(method, place + rest, headers=bob)
                    seen.append((answer.status_code, answer.text))
                assert seen[0] == seen[1], seen
                assert seen[0][0] == 404
            await send(socket, type="cancel", request_id="r")
            await receive_until(socket, "finished")
        await server.retired()
