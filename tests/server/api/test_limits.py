from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.types import Message
from websockets.exceptions import ConnectionClosed

from server.api.errors import BodyTooLarge, RequestTimeout
from server.api.gate import BodyLimit
from tests.fakes import FakeEngine
from tests.server.harness import Gate, Running, running


async def read_through(limit_bytes: int, timeout_s: float, messages: list[Message]) -> bytes:
    """What an app reads within a `BodyLimit` from a client that then falls silent."""

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    limit = BodyLimit(limit_bytes, timeout_s)
    bounded = limit.bounded({"path": "/"}, Headers({}), receive)
    read, more = bytearray(), True
    while more:
        message = await bounded()
        read.extend(message["body"])
        more = message["more_body"]
    return bytes(read)


def part(body: bytes, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_body_up_to_the_limit_passes() -> None:
    assert await read_through(4, 10, [part(b"ab", True), part(b"cd", False)]) == b"abcd"


async def test_body_over_the_limit_stops_the_reading() -> None:
    with pytest.raises(BodyTooLarge):
        await read_through(4, 10, [part(b"ab", True), part(b"cde", True)])


async def test_stalled_body_times_out() -> None:
    with pytest.raises(RequestTimeout):
        await read_through(4, 0.01, [part(b"ab", True)])


async def test_connections_over_the_limit_are_refused() -> None:
    async with running(max_connections=1) as server, server.socket():
        response = await server.http.get("/v1/models")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "too_many_connections"
        assert "retry-after" in response.headers
        async with server.socket() as second:
            with pytest.raises(ConnectionClosed):
                await second.recv()
            assert second.close_code == 1013
        assert (await server.http.get("/health")).status_code == 200


async def test_connection_that_ends_makes_room() -> None:
    gate = Gate()
    async with running(FakeEngine(before_step=gate), max_connections=1) as server:
        work = asyncio.create_task(server.generate(prompt="hi", max_tokens=1))
        await gate.reached()
        assert (await server.http.get("/v1/models")).status_code == 503
        gate.open()
        await work
        assert (await server.http.get("/v1/models")).status_code == 200


async def test_openapi_describes_bodies_and_answers(server: Running) -> None:
    document = (await server.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path, name in (
        ("/v1/completions", "CompletionBody"),
        ("/v1/sessions", "CreateSessionBody"),
        ("/v1/sessions/{session}/append", "AppendBody"),
    ):
        content = document["paths"][path]["post"]["requestBody"]["content"]
        assert content["application/json"]["schema"] == {"$ref": f"#/components/schemas/{name}"}
        # An unknown field asks for nothing where it is null, as some clients send it.
        assert schemas[name]["additionalProperties"] == {"type": "null"}
    assert "temperature" in schemas["CompletionBody"]["properties"]
    assert set(_references(document)) <= {f"#/components/schemas/{name}" for name in schemas}


def _references(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [found for part in value.values() for found in _references(part)]
    if isinstance(value, list):
        return [found for part in value for found in _references(part)]
    return []


async def test_docs_page_is_ours_and_under_the_policy(server: Running) -> None:
    for path in ("/docs", "/static/docs.js", "/static/docs.css"):
        response: httpx.Response = await server.http.get(path)
        assert response.status_code == 200
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert "https://" not in response.text


async def test_disconnect_within_the_body_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as peer:
            peer.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b'Content-Length: 100\r\n\r\n{"prompt":'
            )
        assert (await server.generate(prompt="a", max_tokens=1)).status_code == 200
    assert "Traceback" not in caplog.text
    assert "Exception in ASGI application" not in caplog.text
