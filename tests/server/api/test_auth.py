from __future__ import annotations

import base64
from collections.abc import AsyncIterator

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from server.api.auth.keyring import Keyring
from server.api.auth.scopes import ALL_SCOPES
from tests.server.harness import Running, receive, running, send

ALICE, BOB = "key-of-alice", "key-of-bob"


@pytest.fixture
async def guarded() -> AsyncIterator[Running]:
    async with running(
        api_keys=(ALICE, BOB), allowed_origins=("https://friend.example",)
    ) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def offers(key: str) -> list[str]:
    return [
        "everstream.v1",
        "everstream.key." + base64.urlsafe_b64encode(key.encode()).decode().rstrip("="),
    ]


CLOSED = [
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("POST", "/v1/sessions"),
    ("GET", "/v1/sessions/x"),
    ("POST", "/v1/sessions/x/append"),
    ("DELETE", "/v1/sessions/x"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("PUT", "/v1/models"),
    ("GET", "/v1/stream"),
    ("GET", "/static"),
    ("GET", "//"),
]


@pytest.mark.parametrize(
    "headers", [{}, bearer("wrong"), {"authorization": ALICE}, {"authorization": "Bearer"}]
)
async def test_every_route_wants_a_key(guarded: Running, headers: dict[str, str]) -> None:
    for method, path in CLOSED:
        url = httpx.URL(f"http://127.0.0.1:{guarded.port}").copy_with(raw_path=path.encode())
        response = await guarded.http.request(method, url, headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


async def test_page_and_probes_are_open(guarded: Running) -> None:
    for path in ("/health", "/ready"):
        assert (await guarded.http.get(path)).status_code == 200
    for path in ("/", "/static/nothing"):
        assert (await guarded.http.get(path)).status_code in (200, 404)


async def test_right_key_opens(guarded: Running) -> None:
    for key in (ALICE, BOB):
        assert (await guarded.http.get("/v1/models", headers=bearer(key))).status_code == 200


async def test_another_owner_s_session_looks_like_none(guarded: Running) -> None:
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


async def test_socket_without_a_key_is_refused_with_401(guarded: Running) -> None:
    for headers in ({}, bearer("wrong")):
        with pytest.raises(InvalidStatus) as refused:
            async with guarded.socket(additional_headers=headers):
                pass
        assert refused.value.response.status_code == 401
        assert b"invalid_api_key" in (refused.value.response.body or b"")


@pytest.mark.parametrize("key", ["wrong", "", "ké", "\x00"])
async def test_browser_s_socket_with_a_wrong_key_closes_with_1008(
    guarded: Running, key: str
) -> None:
    async with guarded.socket(subprotocols=offers(key)) as socket:
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1008


async def test_malformed_key_subprotocol_closes_with_1008(guarded: Running) -> None:
    async with guarded.socket(subprotocols=["everstream.v1", "everstream.key.A"]) as socket:
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


async def test_allowed_origin_passes_the_browser_s_preflight(guarded: Running) -> None:
    asked = {"access-control-request-method": "POST", "origin": "https://friend.example"}
    response = await guarded.http.options("/v1/completions", headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://friend.example"


async def test_malformed_host_is_a_400(guarded: Running) -> None:
    for host in ("", "a b", "a/b", "a:port", "<script>"):
        head = f"GET /health HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        answer = await guarded.exchange(head.encode())
        assert answer.startswith(b"HTTP/1.1 400"), host


def test_without_keys_everybody_is_one_owner_with_every_scope() -> None:
    keyring = Keyring()
    assert keyring.caller(None) is keyring.caller("any")
    caller = keyring.caller(None)
    assert caller is not None
    assert caller.tenant.name == "anyone"
    assert caller.scopes == ALL_SCOPES


def test_key_of_a_flag_may_all_but_administer() -> None:
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
