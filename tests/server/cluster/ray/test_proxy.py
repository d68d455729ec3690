from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.cluster.ray.proxy import SESSION_HEADER, Patience, SessionHint, middlewares

SESSION = "sess_" + "0a" * 16
OTHER = "sess_" + "f0" * 20


async def nothing() -> Message:
    raise AssertionError


async def nowhere(message: Message) -> None:
    raise AssertionError


async def seen(path: str = "/", query: str = "", **headers: str) -> list[tuple[bytes, bytes]]:
    """The headers as the router sees them."""
    found: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope)

    scope: dict[str, Any] = {
        "type": "http",
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.replace("_", "-").encode(), v.encode()) for name, v in headers.items()],
    }
    before = dict(scope)
    await SessionHint(app)(scope, nothing, nowhere)
    assert scope == before
    return list(found[0]["headers"])


@pytest.mark.parametrize("rest", ["", "/", "/append", "/events"])
async def test_path_names_the_session(rest: str) -> None:
    headers = await seen(f"/v1/sessions/{SESSION}{rest}", accept="x")
    assert headers == [(b"accept", b"x"), (SESSION_HEADER, SESSION.encode())]


async def test_query_names_the_session() -> None:
    for path in ("/v1/stream", "/v1/completions"):
        headers = await seen(path, query=f"a=1&session={SESSION}")
        assert headers == [(SESSION_HEADER, SESSION.encode())]


async def test_path_is_believed_before_query_and_query_before_header() -> None:
    path = f"/v1/sessions/{SESSION}"
    assert await seen(path, f"session={OTHER}") == [(SESSION_HEADER, SESSION.encode())]
    assert await seen(path, x_session_id=OTHER) == [(SESSION_HEADER, SESSION.encode())]
    assert await seen("/", f"session={OTHER}", x_session_id=SESSION) == [
        (SESSION_HEADER, OTHER.encode())
    ]
    assert await seen("/", x_session_id=SESSION) == [(SESSION_HEADER, SESSION.encode())]


@pytest.mark.parametrize(
    "name", ["", "import", "sess_", "sess_\n", "sess_" + "a" * 60, "SESS_A", "sess_a/b", "sess_ä"]
)
async def test_what_is_no_session_is_no_hint(name: str) -> None:
    assert await seen(f"/v1/sessions/{name}" if "/" not in name else "/") == []
    assert await seen("/", x_session_id=name) == []
    assert await seen("/", f"session={name}") == []


async def test_client_does_not_tell_the_proxy_when_to_give_up() -> None:
    headers = {"x-request-timeout-seconds": "1", "x-request-disconnect-disabled": "?1"}
    assert await seen("/", accept="x", **headers) == [(b"accept", b"x")]


def test_session_is_found_before_serve_sees_the_request() -> None:
    assert [each.cls for each in middlewares()] == [SessionHint, Patience]


# The client that never reads


class NeverReads:
    """The sending side of a connection that takes one message and no more."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    async def send(self, message: Message) -> None:
        if self.sent:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(
    ("kind", "left"), [("http", "http.disconnect"), ("websocket", "websocket.disconnect")]
)
async def test_client_that_never_reads_is_gone(kind: str, left: str) -> None:
    got: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reading = asyncio.create_task(receive())
        for number in range(3):
            await send({"type": "x", "number": number})
        got.append(await reading)

    client = NeverReads()
    async with asyncio.timeout(10):
        await Patience(app, timeout_s=0.01)({"type": kind}, client.receive, client.send)
    assert [message["number"] for message in client.sent] == [0]
    assert [message["type"] for message in got] == [left]


async def test_client_that_reads_gets_and_says_everything() -> None:
    said: list[Message] = [{"type": "websocket.receive", "text": str(n)} for n in range(3)]
    heard: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(3):
            await send(await receive())

    async def receive() -> Message:
        return said[len(heard)]

    async def send(message: Message) -> None:
        heard.append(message)

    await Patience(app)({"type": "websocket"}, receive, send)
    assert heard == said
