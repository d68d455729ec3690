"""33: tenant B with every verb on A's session gets the same 404 as for none.

The engine decides, and is the real one. A new verb is one line in `ROUTES` or
`MESSAGES`; a test says so if it is forgotten.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection

from server.api.schemas.requests import MESSAGE_TYPES
from tests.server.harness import Running, receive, receive_until, running, send

ALICE, BOB = "key-of-alice", "key-of-bob"

#: What can be done to a session: method, path and body, in which ID is its id.
ROUTES: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "info": ("GET", "/v1/sessions/ID", None),
    "delete": ("DELETE", "/v1/sessions/ID", None),
    "append text": ("POST", "/v1/sessions/ID/append", {"text": "a"}),
    "append tokens": ("POST", "/v1/sessions/ID/append", {"tokens": [1, 2]}),
    "complete": ("POST", "/v1/completions", {"session": "ID", "prompt": "hi"}),
    "complete without a prompt": ("POST", "/v1/completions", {"session": "ID"}),
    "complete and keep": (
        "POST",
        "/v1/completions",
        {"session": "ID", "prompt": "hi", "keep": True},
    ),
    "stream": ("POST", "/v1/completions", {"session": "ID", "prompt": "hi", "stream": True}),
    "fork": ("POST", "/v1/sessions/ID/fork", {}),
    "fork the past": ("POST", "/v1/sessions/ID/fork", {"at": 2, "n": 2}),
    "rewind": ("POST", "/v1/sessions/ID/rewind", {"at": 2}),
    "cancel": ("POST", "/v1/sessions/ID/cancel", None),
    "events": ("GET", "/v1/sessions/ID/events?starting_after=0", None),
    "events taken over": ("GET", "/v1/sessions/ID/events?take_over=true", None),
    "durable stream": ("GET", "/v1/sessions/ID/stream?offset=-1", None),
    "export": ("GET", "/v1/sessions/ID/export", None),
    "text": ("GET", "/v1/sessions/ID/text", None),
}
#: Paths about sessions that name none.
WITHOUT_ID = {"/v1/sessions", "/v1/sessions/import"}

#: The same for messages on a socket.
MESSAGES: dict[str, dict[str, Any]] = {
    "generate": {"type": "generate", "session": "ID", "prompt": "hi"},
    "generate without a prompt": {"type": "generate", "session": "ID"},
    "append text": {"type": "append", "session": "ID", "text": "a"},
    "append tokens": {"type": "append", "session": "ID", "tokens": [1, 2]},
    "delete": {"type": "delete", "session": "ID"},
    "fork": {"type": "fork", "session": "ID"},
    "fork the past": {"type": "fork", "session": "ID", "at": 2},
    "rewind": {"type": "rewind", "session": "ID", "at": 2},
    "resume": {"type": "resume", "session": "ID", "last_seq": 0},
    "resume with force": {"type": "resume", "session": "ID", "last_seq": 0, "take_over": True},
}
#: Messages that name no session.
ABOUT_NONE = {"create", "cancel", "detach"}


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(api_keys=(ALICE, BOB)) as started:
        yield started


def bearer(key: str) -> dict[str, str]:
    """With a request id of its own: one that the server draws is another one in each answer."""
    return {"authorization": f"Bearer {key}", "x-request-id": "r"}


def of(value: Any, session: str) -> Any:
    """``value`` with ``session`` in the place of ID."""
    if isinstance(value, dict):
        return {name: of(part, session) for name, part in value.items()}
    return value.replace("ID", session) if isinstance(value, str) else value


async def answer(server: Running, verb: str, session: str, key: str) -> tuple[Any, ...]:
    """All that a client can see of the answer, the date left out."""
    method, path, body = ROUTES[verb]
    response = await server.http.request(
        method, of(path, session), json=of(body, session), headers=bearer(key)
    )
    headers = [pair for pair in response.headers.raw if pair[0].lower() != b"date"]
    return response.status_code, headers, response.content


async def frame(socket: ClientConnection, verb: str, session: str) -> str | bytes:
    await send(socket, request_id="r", **of(MESSAGES[verb], session))
    return await socket.recv()


async def alices_session(server: Running) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 5, "keep": True, "ignore_eos": True}
    kept = await server.http.post("/v1/completions", json=body, headers=bearer(ALICE))
    session: str = kept.json()["session"]
    return session


async def seen_by_alice(server: Running, session: str) -> dict[str, Any]:
    info = await server.http.get(f"/v1/sessions/{session}", headers=bearer(ALICE))
    assert info.status_code == 200
    return {name: value for name, value in info.json().items() if name != "idle_s"}


def none_like(session: str) -> str:
    """An id of the same shape that no session has."""
    return re.sub(r"[0-9a-f]", "0", session)


async def test_table_has_every_route_and_message(server: Running) -> None:
    document = (await server.http.get("/openapi.json", headers=bearer(ALICE))).json()
    there = {
        (method.upper(), path.replace("{session}", "ID"))
        for path, methods in document["paths"].items()
        for method in methods
        if path.startswith("/v1/sessions") and path not in WITHOUT_ID
    }
    named = {(method, path.partition("?")[0]) for method, path, _ in ROUTES.values()}
    assert there - named == set()
    assert {message["type"] for message in MESSAGES.values()} == {*MESSAGE_TYPES} - ABOUT_NONE


@pytest.mark.parametrize("verb", ROUTES)
async def test_route_answers_for_another_s_session_as_for_none(server: Running, verb: str) -> None:
    session = await alices_session(server)
    before = await seen_by_alice(server, session)
    hers = await answer(server, verb, session, BOB)
    assert hers[0] == 404
    assert hers == await answer(server, verb, none_like(session), BOB)
    assert hers == await answer(server, verb, "sess_0", BOB)
    assert session.encode() not in hers[2]
    assert await seen_by_alice(server, session) == before
    # The verb is a right one: its owner gets another answer.
    assert (await answer(server, verb, session, ALICE))[0] == 200


@pytest.mark.parametrize("verb", MESSAGES)
async def test_message_answers_for_another_s_session_as_for_none(
    server: Running, verb: str
) -> None:
    session = await alices_session(server)
    before = await seen_by_alice(server, session)
    async with server.socket(additional_headers=bearer(BOB)) as socket:
        hers = await frame(socket, verb, session)
        assert '"status":404' in str(hers)
        assert hers == await frame(socket, verb, none_like(session))
        assert hers == await frame(socket, verb, "sess_0")
        assert session not in str(hers)
    assert await seen_by_alice(server, session) == before
    async with server.socket(additional_headers=bearer(ALICE)) as socket:
        assert '"type":"error"' not in str(await frame(socket, verb, session))


async def test_running_session_is_not_found_by_another_tenant(server: Running) -> None:
    """Neither 409 nor an end to it: a stranger learns and changes nothing."""
    session = await alices_session(server)
    async with (
        server.socket(additional_headers=bearer(ALICE)) as hers,
        server.socket(additional_headers=bearer(BOB)) as socket,
    ):
        work = {"session": session, "prompt": "hi", "max_tokens": 1_000_000, "ignore_eos": True}
        await send(hers, type="generate", request_id="r", **work)
        await receive_until(hers, "token")
        for verb in ROUTES:
            there = await answer(server, verb, session, BOB)
            assert there == await answer(server, verb, none_like(session), BOB)
            assert there[0] == 404, verb
        for verb in MESSAGES:
            assert await frame(socket, verb, session) == await frame(
                socket, verb, none_like(session)
            )
        await send(socket, type="cancel", request_id="r")
        assert (await seen_by_alice(server, session))["busy"]
        await receive_until(hers, "token")
        await send(hers, type="cancel", request_id="r")
        finished = (await receive_until(hers, "finished"))[-1]
        assert finished["finish_reason"] == "cancelled"


async def test_deleted_session_looks_the_same_to_its_owner_and_another_tenant(
    server: Running,
) -> None:
    session = await alices_session(server)
    await server.http.delete(f"/v1/sessions/{session}", headers=bearer(ALICE))
    for verb in ROUTES:
        mine = await answer(server, verb, session, ALICE)
        assert mine[0] == 404
        assert mine == await answer(server, verb, session, BOB)


async def test_list_shows_only_sessions_of_the_tenant(server: Running) -> None:
    session = await alices_session(server)
    for key, shown in ((ALICE, [session]), (BOB, [])):
        for query in ("", "?limit=1", f"?after={none_like(session)}"):
            listed = await server.http.get(f"/v1/sessions{query}", headers=bearer(key))
            assert [one["session"] for one in listed.json()["data"]] == shown, (key, query)


async def test_idempotency_keys_belong_to_a_tenant(server: Running) -> None:
    """The same key of two tenants names two pieces of work."""
    sessions = set()
    for key in (ALICE, BOB, ALICE, BOB):
        body = {"prompt": "hi", "max_tokens": 2, "keep": True, "idempotency_key": "k"}
        answer = await server.http.post("/v1/completions", json=body, headers=bearer(key))
        sessions.add((key, answer.json()["session"]))
    assert len(sessions) == len({session for _, session in sessions}) == 2


async def test_request_ids_belong_to_a_tenant(server: Running) -> None:
    """The same request id on two sockets names two requests, of two owners or of one."""
    for key in (ALICE, BOB):
        async with (
            server.socket(additional_headers=bearer(ALICE)) as hers,
            server.socket(additional_headers=bearer(key)) as socket,
        ):
            work = {"request_id": "r", "prompt": "hi", "ignore_eos": True}
            await send(hers, type="generate", max_tokens=1_000_000, **work)
            await receive_until(hers, "token")
            await send(socket, type="generate", max_tokens=3, **work)
            assert (await receive_until(socket, "finished"))[-1]["finish_reason"] == "length"
            await send(hers, type="cancel", request_id="r")
            while (last := await receive(hers))["type"] == "token":
                pass
            assert last["finish_reason"] == "cancelled"
