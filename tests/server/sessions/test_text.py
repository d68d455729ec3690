"""`GET /v1/sessions/{session}/text`: what a session has read and generated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes import STORY, FakeEngine
from tests.server.harness import Gate, Running, running


async def create(server: Running) -> str:
    session: str = (await server.http.post("/v1/sessions", json={})).json()["session"]
    return session


async def read(server: Running, session: str, **query: Any) -> dict[str, Any]:
    response = await server.http.get(f"/v1/sessions/{session}/text", params=query)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def test_shows_what_was_fed_and_what_was_generated(server: Running) -> None:
    session = await create(server)
    path = f"/v1/sessions/{session}"
    assert (await read(server, session))["parts"] == []
    await server.generate(prompt="Hello", session=session, max_tokens=20, seed=0)
    await server.http.post(f"{path}/append", json={"text": "[more]"})
    await server.generate(session=session, max_tokens=4, seed=0)
    body = await read(server, session)
    parts = [(part["kind"], part["start"], part["end"], part["text"]) for part in body.pop("parts")]
    assert parts == [
        ("input", 0, 5, "Hello"),
        ("output", 5, 25, STORY[5:25].decode()),
        ("input", 25, 31, "[more]"),
        ("output", 31, 35, STORY[31:35].decode()),
    ]
    epoch = server.async_engine.epoch_name(0)
    assert body == {"session": session, "epoch": epoch, "start": 0, "end": 35, "position": 35}


async def test_pages_make_the_whole_text(server: Running) -> None:
    session = await create(server)
    await server.generate(prompt="Hello", session=session, max_tokens=40, seed=0)
    whole = "".join(part["text"] for part in (await read(server, session))["parts"])
    start, text = 0, ""
    while start < 45:
        body = await read(server, session, start=start, max_tokens=7)
        assert body["start"] == start
        assert body["end"] == min(start + 7, 45)
        text += "".join(part["text"] for part in body["parts"])
        start = body["end"]
    assert text == whole
    assert (await read(server, session, start=45))["parts"] == []


async def test_page_ends_between_two_characters(server: Running) -> None:
    """The fake engine's tokens are bytes."""
    session = await create(server)
    await server.http.post(f"/v1/sessions/{session}/append", json={"text": "né"})
    body = await read(server, session, max_tokens=2)
    assert (body["end"], body["parts"][0]["text"]) == (1, "n")
    body = await read(server, session, start=1)
    assert (body["end"], body["parts"][0]["text"]) == (3, "é")


@pytest.mark.parametrize("size", range(1, 7))
async def test_no_page_cuts_a_character(server: Running, size: int) -> None:
    """Also those that are smaller than one, and where it is in two parts."""
    session, text = await create(server), "né漢🙂é"
    head, tail = list(text.encode()[:7]), list(text.encode()[7:])
    for tokens in (head, tail):
        await server.http.post(f"/v1/sessions/{session}/append", json={"tokens": tokens})
    found, start, sizes = "", 0, list[int]()
    while start < len(text.encode()):
        body = await read(server, session, start=start, max_tokens=size)
        found += "".join(part["text"] for part in body["parts"])
        sizes.append(body["end"] - start)
        start = body["end"]
    assert found == text
    assert max(sizes) <= max(size, 4) and min(sizes) > 0


async def test_text_of_a_session_that_runs_ends_at_the_present() -> None:
    gate = Gate()
    async with running(FakeEngine(before_step=gate)) as server:
        session = await create(server)
        work = server.generate(prompt="hi", session=session, max_tokens=10**6)
        running_work = asyncio.create_task(work)
        await gate.reached()
        gate.open()
        assert (await read(server, session))["parts"][0]["text"] == "hi"
        await server.http.delete(f"/v1/sessions/{session}")
        await running_work


async def test_what_was_cut_off_by_a_rewind_is_not_shown(server: Running) -> None:
    session = await create(server)
    await server.generate(prompt="Hello", session=session, max_tokens=20, seed=0)
    await server.http.post(f"/v1/sessions/{session}/rewind", json={"at": 10})
    await server.http.post(f"/v1/sessions/{session}/append", json={"text": "!"})
    body = await read(server, session)
    assert [part["text"] for part in body["parts"]] == ["Hello", STORY[5:10].decode(), "!"]
    assert body["position"] == 11


async def test_copy_shows_its_own_text_and_names_where_that_begins(server: Running) -> None:
    session = await create(server)
    await server.generate(prompt="Hello", session=session, max_tokens=20, seed=0)
    forked = await server.http.post(f"/v1/sessions/{session}/fork", json={"at": 15})
    (copy,) = forked.json()["sessions"]
    body = await read(server, copy)
    assert (body["start"], body["end"], body["position"], body["parts"]) == (15, 15, 15, [])
    await server.http.post(f"/v1/sessions/{copy}/append", json={"text": "?"})
    assert [part["start"] for part in (await read(server, copy))["parts"]] == [15]
    gone = await server.http.get(f"/v1/sessions/{copy}/text", params={"start": 3})
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "history_gone")
    assert gone.json()["error"]["param"] == "start"


@pytest.mark.parametrize(
    ("name", "value"),
    [("start", -1), ("start", 6), ("start", "x"), ("max_tokens", 0), ("max_tokens", 16_385)],
)
async def test_bad_value_is_refused_by_name(server: Running, name: str, value: object) -> None:
    session = await create(server)
    await server.http.post(f"/v1/sessions/{session}/append", json={"text": "Hello"})
    response = await server.http.get(f"/v1/sessions/{session}/text", params={name: str(value)})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


async def test_unknown_session_is_404(server: Running) -> None:
    response = await server.http.get("/v1/sessions/sess_0/text")
    assert response.json()["error"]["code"] == "session_not_found"
