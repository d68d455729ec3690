"""32: every route, method and socket without a key: 401; a malformed Host: 400."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.server.harness import Running, running

KEY = "the-right-key"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
#: All that the operator's probes and a page need before there is a key. Nothing else is open.
OPEN = {"/", "/health", "/ready"}
#: What the document does not name.
BESIDE_THE_DOCUMENT = {
    "/docs",
    "/openapi.json",
    "/asyncapi.json",
    "/v1/stream",
    "/static",
    "/nothing",
    "//",
    "/v1/",
}
WRONG_KEYS = (
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer"},
    {"authorization": KEY},
    {"authorization": f"Basic {KEY}"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Bearer {KEY.upper()}"},
    {"x-api-key": KEY.upper()},
    {"x-key": KEY},
    {"cookie": f"key={KEY}"},
    {"sec-websocket-protocol": "everstream.v1, everstream.key.d3Jvbmc"},
)
BAD_HOSTS = ("", "a b", "a/b", "a:port", "a:999999", "<script>", "a,b", "[::1", "a\tb", "user@a")


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async with running(api_keys=(KEY,)) as started:
        yield started


async def paths(server: Running) -> list[str]:
    """Every path of the API's own description, with values for its parameters, and some more."""
    answer = await server.http.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"})
    documented = [re.sub(r"\{\w+\}", "x", path) for path in answer.json()["paths"]]
    assert len(documented) > 5
    return sorted({*documented, *BESIDE_THE_DOCUMENT})


async def ask(server: Running, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    url = httpx.URL(f"http://127.0.0.1:{server.port}").copy_with(raw_path=path.encode())
    return await server.http.request(method, url, headers=headers)


async def test_every_method_of_every_route_is_401_without_a_key(server: Running) -> None:
    asked = 0
    for path in await paths(server):
        for method in METHODS:
            answer = await ask(server, method, path, {})
            if path in OPEN:
                assert answer.status_code != 401, (method, path)
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert b"invalid_api_key" in answer.content, (method, path)
            asked += 1
    assert asked > 100


async def test_every_route_is_401_with_what_is_not_the_key(server: Running) -> None:
    for path in await paths(server):
        for headers in WRONG_KEYS if path not in OPEN else ():
            for method in ("GET", "POST"):
                answer = await ask(server, method, path, headers)
                assert answer.status_code == 401, (method, path, headers)


async def test_key_in_the_query_opens_nothing(server: Running) -> None:
    for name in ("key", "api_key", "token", "access_token"):
        answer = await server.http.get(f"/v1/models?{name}={KEY}")
        assert answer.status_code == 401


async def test_refused_requests_leave_nothing_behind(server: Running) -> None:
    for path in await paths(server):
        for method in ("POST", "DELETE"):
            await ask(server, method, path, {})
    stats = await server.stats()
    assert (stats.num_sessions, stats.num_running, stats.prompt_tokens_total) == (0, 0, 0)


async def test_socket_is_401_without_a_key_and_a_page_s_closes_with_1008(server: Running) -> None:
    for headers in WRONG_KEYS[:-1]:
        with pytest.raises(InvalidStatus) as refused:
            async with server.socket(additional_headers=headers):
                pass
        assert refused.value.response.status_code == 401, headers
    for offered in (["everstream.v1"], ["everstream.v1", "everstream.key.d3Jvbmc"]):
        async with server.socket(subprotocols=offered) as socket:
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1008


async def test_malformed_host_is_400_on_every_route_with_any_key(server: Running) -> None:
    for path in await paths(server):
        for host in BAD_HOSTS:
            answer = await exchange(server, path, [f"Host: {host}"])
            assert answer.startswith(b"HTTP/1.1 400 "), (path, host)
            assert b"connection: close" in answer.lower(), (path, host)


async def test_no_host_or_two_are_400(server: Running) -> None:
    for lines in ([], ["Host: a", "Host: b"]):
        assert (await exchange(server, "/v1/models", lines)).startswith(b"HTTP/1.1 400 "), lines


async def test_socket_with_a_malformed_host_is_400(server: Running) -> None:
    upgrade = [
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
    ]
    for host in BAD_HOSTS:
        answer = await exchange(server, "/v1/stream", [f"Host: {host}", *upgrade])
        assert answer.startswith(b"HTTP/1.1 400 "), host


async def exchange(server: Running, path: str, lines: list[str]) -> bytes:
    """The answer to a GET with the right key and these header lines as they are."""
    head = "\r\n".join([f"GET {path} HTTP/1.1", *lines, f"Authorization: Bearer {KEY}", "", ""])
    return await server.exchange(head.encode())
