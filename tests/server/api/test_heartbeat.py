"""A silent stream has comments, before its first token and after it; a socket has pings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.sse import DONE, SseParser
from benchmarks.websocket import PING, handshake
from server.api.answers import COMMENT, NUM_TICKS, DirectWriter
from server.engine.types import Event, TokenEvent
from server.runtime.queues import EventQueue
from tests.fakes import FakeEngine
from tests.reliability.raw_websocket import connected, opened
from tests.server.api.talk import create, kept
from tests.server.harness import Gate, Running, receive_until, running, send
from tests.waiting import started_task

ASKED = {"max_tokens": 6, "seed": 0, "stream": True}
#: What each route is asked for; the answer must not depend on comments.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", **ASKED},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], **ASKED},
    "/v1/responses": {"input": "hi", "max_output_tokens": 6, "seed": 0, "stream": True},
}
LINE = COMMENT.strip()


class Reader:
    """The data of a stream's events, and its comments, as they come."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks, self._parser = chunks, SseParser()
        self.data: list[str] = []

    async def until_comment(self) -> None:
        """Reads to the next comment; the stream must not end before."""
        seen = self._parser.num_comments
        while self._parser.num_comments == seen:
            self._take(await anext(self._chunks))

    async def until(self, found: Callable[[str], bool]) -> None:
        while not (self.data and found(self.data[-1])):
            self._take(await anext(self._chunks))

    async def to_the_end(self) -> None:
        async for chunk in self._chunks:
            self._take(chunk)

    def _take(self, chunk: bytes) -> None:
        assert all(line == LINE for line in chunk.split(b"\n") if line.startswith(b":")), chunk
        self.data += [event.data for event in self._parser.feed(chunk)]


@asynccontextmanager
async def reading(
    server: Running, path: str, body: dict[str, Any] | None = None
) -> AsyncIterator[Reader]:
    method = "GET" if body is None else "POST"
    async with server.http.stream(method, path, json=body) as response:
        assert response.status_code == 200
        yield Reader(response.aiter_bytes())


def text_of(data: list[str]) -> str:
    """What was generated, of any of the three routes."""
    events = [json.loads(one) for one in data if one != DONE]
    parts = []
    for event in events:
        choices = event.get("choices", ())
        parts += [one.get("text") or one.get("delta", {}).get("content") or "" for one in choices]
        if event.get("type") == "response.output_text.delta":
            parts.append(event["delta"])
    return "".join(parts)


@asynccontextmanager
async def busy(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Running, Callable[[], Awaitable[None]]]]:
    """A server whose one request runs until the second value is called: others wait."""
    monkeypatch.setattr("server.engine.scheduler.TURN_TOKENS", 10**9)
    async with (
        running(FakeEngine(max_running=1), heartbeat_s=0.05) as server,
        server.socket() as socket,
    ):

        async def free() -> None:
            await send(socket, type="cancel", request_id="first")

        await send(socket, type="generate", request_id="first", prompt="hi", max_tokens=10**6)
        await receive_until(socket, "token")
        yield server, free


@pytest.mark.process  # a chat template is rendered in a child process
@pytest.mark.parametrize("path", BODIES)
async def test_request_that_waits_for_its_turn_has_comments(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come before anything else, and what follows is what it would have been."""
    async with busy(monkeypatch) as (server, free):
        async with reading(server, path, BODIES[path]) as reader:
            await reader.until_comment()
            await reader.until_comment()
            assert reader.data == []
            await free()
            await reader.to_the_end()
        async with reading(server, path, BODIES[path]) as again:
            await again.to_the_end()
    assert text_of(reader.data) == text_of(again.data) != ""


async def test_stream_that_falls_silent_has_comments_between_its_events() -> None:
    gate = Gate()
    async with running(FakeEngine(before_step=gate), heartbeat_s=0.05) as server:
        gate.allow(3)
        async with reading(server, "/v1/completions", BODIES["/v1/completions"]) as reader:
            await reader.until(lambda data: '"text"' in data)
            await reader.until_comment()
            gate.open()
            await reader.to_the_end()
        assert reader.data[-1] == DONE
        assert len(text_of(reader.data)) == 6


async def test_events_of_a_session_have_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    async with busy(monkeypatch) as (server, free), server.socket() as socket:
        session = await create(server)
        work = {"session": session, "prompt": "hi", "max_tokens": 6, "seed": 0}
        await send(socket, type="generate", request_id="a", **work)
        await send(socket, type="detach", request_id="a")
        await receive_until(socket, "detached")
        async with reading(server, f"/v1/sessions/{session}/events") as reader:
            await reader.until_comment()
            assert [json.loads(data)["type"] for data in reader.data] == ["resumed"]
            await free()
            await reader.to_the_end()
        assert len([data for data in reader.data if '"token"' in data]) == 6


async def test_durable_stream_of_an_idle_session_has_comments() -> None:
    async with running(heartbeat_s=0.05) as server:
        session = await kept(server, 3)
        path = f"/v1/sessions/{session}/stream?offset=now&live=sse"
        async with reading(server, path) as reader:
            await reader.until_comment()
            await reader.until_comment()
            assert len(reader.data) == 1  # where the stream is
            await kept(server, 3, session=session)
            await reader.until(lambda data: len(reader.data) > 1)


@pytest.mark.process
async def test_stream_of_a_background_response_has_comments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with busy(monkeypatch) as (server, free):
        body = {"input": "hi", "background": True, "max_output_tokens": 6, "seed": 0}
        response = (await server.http.post("/v1/responses", json=body)).json()
        async with reading(server, f"/v1/responses/{response['id']}?stream=true") as reader:
            await reader.until_comment()
            await free()
            await reader.to_the_end()
        assert text_of(reader.data)


async def test_client_of_http_1_0_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nginx asks by default; such a stream has no direct writes."""
    body = json.dumps(BODIES["/v1/completions"]).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    async with busy(monkeypatch) as (server, free):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head % len(body) + body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(2 * len(COMMENT)) == 2 * COMMENT
        await free()
        assert (await reader.read()).endswith(b"data: [DONE]\n\n")
        writer.close()


async def test_failure_after_a_comment_is_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async with busy(monkeypatch) as (server, free):
        body = {**BODIES["/v1/completions"], "prompt": "hi<fail"}
        async with reading(server, "/v1/completions", body) as reader:
            await reader.until_comment()
            await free()
            await reader.to_the_end()
        error, done = reader.data
        assert '"internal_error"' in error
        assert done == DONE


@pytest.mark.parametrize("path", ["/v1/stream", "/v1/responses"])
async def test_silent_socket_is_pinged_as_often(path: str) -> None:
    async with running(heartbeat_s=0.05) as server, connected(server.port) as client:
        await client.shake_hands(handshake(path))
        assert (await client.receive()).opcode == PING


async def test_answered_pings_keep_a_socket_open() -> None:
    async with running(heartbeat_s=0.05) as server, opened(server.port) as client:
        pings = asyncio.create_task(client.answer_pings())
        async with asyncio.timeout(60):
            while not (await server.stats()).num_sessions:
                await client.ask(type="create", request_id="a")
        assert not pings.done()
        pings.cancel()


class Ticks:
    """Stands for the timer of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.due: list[Callable[[], None]] = []
        self.num_cancelled = 0
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", self._call_later)

    def _call_later(self, delay_s: float, tick: Callable[[], None]) -> Any:
        self.due.append(tick)
        return self

    def cancel(self) -> None:
        self.num_cancelled += 1

    def pass_(self, number: int) -> None:
        for _ in range(number):
            self.due.pop(0)()


async def test_token_puts_the_comment_off_by_the_whole_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = Ticks(monkeypatch)
    queue: EventQueue[Event] = EventQueue(100)
    written: list[bytes] = []

    def write(parts: Any) -> bool:
        written.extend(parts)
        return True

    direct = DirectWriter(queue, write, lambda tokens: [b"token" for _ in tokens], 15.0)
    with direct:
        taking = await started_task(direct.take())
        ticks.pass_(NUM_TICKS - 1)
        queue.put([TokenEvent("r", seq=1, position=1, token_id=1, text="a")])
        ticks.pass_(NUM_TICKS - 1)
        await asyncio.sleep(0)
        assert (written, taking.done()) == ([b"token"], False)
        ticks.pass_(1)
        assert await taking == ([COMMENT], [])
        assert ticks.num_cancelled == 0
    assert ticks.num_cancelled == 1


async def test_token_without_text_does_not_put_the_comment_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing was sent for it."""
    ticks = Ticks(monkeypatch)
    queue: EventQueue[Event] = EventQueue(100)
    direct = DirectWriter(queue, lambda parts: True, lambda tokens: [b"" for _ in tokens], 15.0)
    with direct:
        taking = await started_task(direct.take())
        ticks.pass_(NUM_TICKS - 1)
        queue.put([TokenEvent("r", seq=1, position=1, token_id=1, text="")])
        ticks.pass_(1)
        assert await taking == ([COMMENT], [])


async def test_without_an_interval_there_is_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    queue: EventQueue[Event] = EventQueue(100)
    with DirectWriter(queue, lambda parts: True, lambda tokens: []):
        assert ticks.due == []
