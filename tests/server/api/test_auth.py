from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from server.api.auth import ALL_SCOPES, Keyring
from tests.server.api.keys import ALICE, BOB, bearer, offers
from tests.server.harness import Running, receive, running, send


@pytest.fixture
async def guarded() -> AsyncIterator[Running]:
    async with running(
        api_keys=(ALICE, BOB), allowed_origins=("https://friend.example",)
    ) as server:
        yield server


async def test_page_and_probes_are_open(guarded: Running) -> None:
    for path in ("/health", "/ready"):
        assert (await guarded.http.get(path)).status_code == 200
    for path in ("/", "/static/nothing"):
        assert (await guarded.http.get(path)).status_code in (200, 404)


async def test_session_of_another_owner_is_not_found(guarded: Running) -> None:
    created = await guarded.http.post("/v1/sessions", headers=bearer(ALICE))
    session = created.json()["session"]
    body = {"session": session, "prompt": "hi", "max_tokens": 1}
    for path, method, json in (
        (f"/v1/sessions/{session}", "GET", None),
        (f"/v1/sessions/{session}", "DELETE", None),
        (f"/v1/sessions/{session}/append", "POST", {"text": "a"}),
        ("/v1/completions", "POST", body),
    ):
        hers = await guarded.http.request(method, path, json=json, headers=bearer(BOB))
        missing = path.replace(session, "sess_none")
        other = {**json, "session": "sess_none"} if json is body else json
        none = await guarded.http.request(method, missing, json=other, headers=bearer(BOB))
        assert hers.status_code == none.status_code == 404
        assert hers.json() == none.json()
    async with guarded.socket(additional_headers=bearer(BOB)) as socket:
        for type in ("generate", "delete"):
            await send(socket, type=type, request_id="a", session=session)
            assert (await receive(socket))["status"] == 404
    headers = bearer(ALICE)
    assert (await guarded.http.get(f"/v1/sessions/{session}", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "offered",
    [*map(offers, ["wrong", "", "ké", "\x00"]), ["everstream.v1", "everstream.key.A"]],
)
async def test_browser_s_socket_with_a_wrong_key_closes_with_1008(
    guarded: Running, offered: Any
) -> None:
    async with guarded.socket(subprotocols=offered) as socket:
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1008


async def test_socket_opens_with_the_key_as_header_or_subprotocol(guarded: Running) -> None:
    options = ({"additional_headers": bearer(ALICE)}, {"subprotocols": offers(ALICE)})
    for option, subprotocol in zip(options, (None, "everstream.v1"), strict=True):
        async with guarded.socket(**option) as socket:
            assert socket.subprotocol == subprotocol
            await send(socket, type="create", request_id="a")
            assert (await receive(socket))["type"] == "created"


async def test_foreign_origin_is_refused_on_sockets_and_unsafe_methods(guarded: Running) -> None:
    same, friend = f"http://127.0.0.1:{guarded.port}", "https://friend.example"
    for origin, allowed in (
        (same, True),
        (friend, True),
        ("https://evil.example", False),
        ("null", False),
    ):
        headers = {**bearer(ALICE), "origin": origin}
        posted = await guarded.http.post("/v1/sessions", headers=headers)
        assert posted.status_code == (200 if allowed else 403)
        assert (await guarded.http.get("/v1/models", headers=headers)).status_code == 200
        if allowed:
            async with guarded.socket(additional_headers=headers):
                pass
            continue
        assert posted.json()["error"]["code"] == "foreign_origin"
        with pytest.raises(InvalidStatus) as refused:
            async with guarded.socket(additional_headers=headers):
                pass
        assert refused.value.response.status_code == 403


def test_without_keys_all_clients_are_one_owner_with_every_scope() -> None:
    keyring = Keyring()
    assert keyring.caller(None) is keyring.caller("any")
    caller = keyring.caller(None)
    assert caller is not None
    assert caller.tenant.name == "anyone"
    assert caller.scopes == ALL_SCOPES


def test_key_of_a_flag_has_every_scope_but_admin() -> None:
    keyring = Keyring((ALICE,), admin_keys=(BOB,))
    alice, bob = keyring.caller(ALICE), keyring.caller(BOB)
    assert alice is not None and bob is not None
    assert alice.scopes == ALL_SCOPES - {"admin"}
    assert bob.scopes == ALL_SCOPES
    assert alice.tenant is not bob.tenant
    assert keyring.caller(None) is keyring.caller("wrong") is None


def test_an_admin_key_alone_closes_the_server_too() -> None:
    assert Keyring(admin_keys=(BOB,)).caller(None) is None


def test_keyring_keeps_no_key() -> None:
    keyring = Keyring((ALICE,), (BOB,))
    caller = keyring.caller(ALICE)
    assert caller is not None
    for text in (repr(vars(keyring)), repr(vars(caller)), caller.tenant.name):
        assert ALICE not in text and BOB not in text
