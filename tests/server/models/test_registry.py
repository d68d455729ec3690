"""Several models behind one listener: each has its engine, its sessions and its counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import receive, receive_until, send
from tests.server.served import Served, served
from tests.tiny import write_model

pytestmark = pytest.mark.slow

NOBODY = f"sess_{0:032x}"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """One model of a plain path and one of a name, with stores in folders."""
    plain, named = write_model(tmp_path / "plain"), write_model(tmp_path / "other", seed=1)
    async with served(str(plain), f"second={named}", store=str(tmp_path / "store")) as started:
        yield started


async def created(server: Served, **body: Any) -> str:
    answer = await server.http.post("/v1/sessions", json=body)
    assert answer.status_code == 200, answer.text
    session: str = answer.json()["session"]
    return session


async def test_request_goes_to_the_model_that_it_names_and_else_to_the_first(
    server: Served,
) -> None:
    first, second = await server.text(model="plain"), await server.text(model="second")
    assert first != second
    assert await server.text() == first
    answer = await server.complete(model="third")
    assert answer["error"]["code"] == "model_not_found"


async def test_list_has_all_models_and_each_has_a_route(server: Served) -> None:
    listed = (await server.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["plain", "second"]
    assert listed[0]["everstream"]["digest"] != listed[1]["everstream"]["digest"]
    for model in listed:
        assert (await server.http.get(f"/v1/models/{model['id']}")).json() == model
    missing = await server.http.get("/v1/models/third")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("model", ["plain", "second"])
async def test_session_continues_in_its_model_without_naming_it(server: Served, model: str) -> None:
    session = await created(server, model=model)
    assert await server.text(session=session) == await server.text(model=model)
    appended = await server.http.post(f"/v1/sessions/{session}/append", json={"text": "and"})
    assert appended.status_code == 200, appended.text
    forked = (await server.http.post(f"/v1/sessions/{session}/fork")).json()["sessions"][0]
    assert (await server.http.get(f"/v1/sessions/{forked}")).status_code == 200
    listed = (await server.http.get("/v1/sessions")).json()["data"]
    assert {(one["session"], one["model"]) for one in listed} == {
        (session, model),
        (forked, model),
    }
    for each in (session, forked):
        assert (await server.http.delete(f"/v1/sessions/{each}")).status_code == 200
        assert (await server.http.get(f"/v1/sessions/{each}")).status_code == 404


async def test_session_never_reaches_another_model(server: Served) -> None:
    session = await created(server, model="second")
    answer = await server.complete(session=session, model="plain")
    assert answer["error"]["code"] == "session_not_found"
    for version in server.models.versions:
        has = await version.service.sessions.has(session, "anyone")
        assert has == (version.name == "second")


async def test_unknown_session_is_404_for_every_method(server: Served) -> None:
    for verb, path in (("GET", ""), ("DELETE", ""), ("POST", "/fork"), ("GET", "/export")):
        answer = await server.http.request(verb, f"/v1/sessions/{NOBODY}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


async def test_list_goes_page_by_page_through_all_models(server: Served) -> None:
    sessions = sorted([await created(server, model=m) for m in ("plain", "second") * 3])
    seen: list[str] = []
    while True:
        query = {"limit": 4, **({"after": seen[-1]} if seen else {})}
        page = (await server.http.get("/v1/sessions", params=query)).json()
        seen += [one["session"] for one in page["data"]]
        if not page["has_more"]:
            break
    assert seen == sessions


async def test_socket_talks_to_several_models(server: Served) -> None:
    async with server.socket() as socket:
        await send(socket, type="create", request_id="c", model="second")
        session = (await receive(socket))["session"]
        work = {"type": "generate", "prompt": "Once", "max_tokens": 20, "seed": 3}
        work["ignore_eos"] = True
        texts = {}
        for name, more in (
            ("plain", {"model": "plain"}),
            ("default", {}),
            ("second", {"model": "second"}),
            ("kept", {"session": session}),
        ):
            await send(socket, request_id=name, **work, **more)
            events = await receive_until(socket, "finished")
            texts[name] = "".join(event.get("text", "") for event in events)
        await send(socket, type="generate", request_id="x", model="third", prompt="Once")
        assert (await receive(socket))["error"]["code"] == "model_not_found"
        await send(socket, type="rewind", request_id="r", session=session, at=1)
        assert (await receive(socket))["position"] == 1
        await send(socket, type="delete", request_id="d", session=session)
        assert (await receive(socket))["type"] == "deleted"
    assert texts["default"] == texts["plain"] != texts["second"] == texts["kept"]
    assert texts["plain"] == await server.text(model="plain")
    assert texts["second"] == await server.text(model="second")


async def test_exported_session_is_taken_by_its_own_model(server: Served) -> None:
    session = await created(server, model="second")
    await server.http.post(f"/v1/sessions/{session}/append", json={"text": "Once"})
    file = (await server.http.get(f"/v1/sessions/{session}/export")).content
    taken = await server.http.post("/v1/sessions/import", content=file)
    assert taken.status_code == 200, taken.text
    listed = (await server.http.get("/v1/sessions")).json()["data"]
    assert {one["model"] for one in listed} == {"second"}
    broken = await server.http.post("/v1/sessions/import", content=file[:-1])
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "import_refused")


async def test_metrics_are_counted_by_model(server: Served) -> None:
    await server.text(model="second")
    lines = (await server.http.get("/metrics")).text.splitlines()
    assert 'everstream_tokens_total{kind="completion",model="second"} 20.0' in lines
    assert 'everstream_tokens_total{kind="completion",model="plain"} 0.0' in lines
    assert 'everstream_requests_total{finish_reason="length",model="second"} 1.0' in lines


async def test_death_of_one_engine_makes_the_server_unhealthy(server: Served) -> None:
    def die(engine: object, now: float) -> None:
        raise SystemExit

    assert (await server.http.get("/ready")).status_code == 200
    with pytest.raises(Exception, match="the engine has stopped"):
        await server.version("second").async_engine.call(die)
    assert server.models.died.is_set()
    assert not server.models.healthy


async def test_each_model_has_its_store_and_finds_it_again(tmp_path: Path) -> None:
    plain, named = write_model(tmp_path / "plain"), write_model(tmp_path / "other", seed=1)
    flags = (str(plain), f"second={named}")
    async with served(*flags, store=str(tmp_path / "store")) as server:
        sessions = [await created(server, model=model) for model in ("plain", "second")]
        before = [await server.text(session=session) for session in sessions]
    assert (tmp_path / "store" / "sessions.sqlite3").is_file()
    assert (tmp_path / "store" / "models" / "second" / "sessions.sqlite3").is_file()
    async with served(*flags[::-1], store=str(tmp_path / "store")) as server:
        for session, text in zip(sessions, before, strict=True):
            rewound = await server.http.post(f"/v1/sessions/{session}/rewind", json={"at": 0})
            assert rewound.status_code == 200, rewound.text
            assert await server.text(session=session) == text
