"""What the messages of a socket may hold before anybody has looked at what they want."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from server.api import stream as websocket
from server.api.openai.responses import routes as responses
from server.api.openai.responses.items import Note
from server.api.openai.responses.routes import MAX_REMEMBERED, RecentTurns
from tests.reliability.servers import socket_to
from tests.server.api.keys import ALICE
from tests.server.api.openai.responding import ASKED
from tests.server.api.test_quota import serving
from tests.server.harness import Running, running

LONG = "a" * 20_000
KEY = {"authorization": f"Bearer {ALICE}"}


def socket(server: Running, path: str) -> connect:
    return socket_to(f"ws://127.0.0.1:{server.port}/v1/{path}", additional_headers=KEY)


async def say(to: ClientConnection, **message: Any) -> None:
    await to.send(json.dumps(message))


async def hear(from_: ClientConnection, **wanted: Any) -> dict[str, Any]:
    """The next frame that has these fields."""
    while True:
        frame: dict[str, Any] = json.loads(await from_.recv())
        if wanted.items() <= frame.items():
            return frame


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the messages that were parsed."""
    sizes: list[int] = []

    def noting(module: Any, name: str) -> None:
        real = getattr(module, name)

        def parse(*args: Any) -> Any:
            sizes.append(max(len(arg) for arg in args if isinstance(arg, str | bytes)))
            return real(*args)

        monkeypatch.setattr(module, name, parse)

    noting(responses, "parse_body")
    noting(responses, "_head")
    noting(websocket, "parse_message")
    return sizes


async def test_waiting_responses_are_bounded_by_their_bytes() -> None:
    body = {"type": "response.create", **ASKED, "instructions": LONG}
    settings = {"max_message_bytes": 50_000, "max_socket_requests": 64}
    async with running(**settings) as server, socket(server, "responses") as ours:
        await say(ours, type="response.create", **{**ASKED, "max_output_tokens": 10**6})
        await hear(ours, type="response.in_progress")
        for _ in range(3):
            await say(ours, **body)
        error = await hear(ours, type="error")
    assert error["error"]["code"] == "queue_full"
    assert "bytes" in error["error"]["message"]


async def test_bytes_wait_until_their_message_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed, a message takes many times its bytes, on each of many streams."""
    gate, real = asyncio.Event(), responses.prepare

    async def held(*args: Any) -> Any:
        await gate.wait()
        return await real(*args)

    monkeypatch.setattr(responses, "prepare", held)
    body = {"type": "response.create", **ASKED, "instructions": LONG}
    async with running(max_message_bytes=50_000) as server, socket(server, "responses") as ours:
        for stream_id in ("a", "b", "c"):
            await say(ours, **body, stream_id=stream_id)
        error = await hear(ours, type="error")
        gate.set()
        for _ in range(2):
            await hear(ours, type="response.incomplete")
        await say(ours, **body, stream_id="c")
        await hear(ours, type="response.incomplete")
    assert (error["error"]["code"], error["stream_id"]) == ("queue_full", "c")


async def test_bytes_of_finished_messages_are_freed() -> None:
    body = {"type": "response.create", **ASKED, "metadata": {"a": "b" * 500}}
    async with running(max_message_bytes=1024) as server, socket(server, "responses") as ours:
        for _ in range(4):
            await say(ours, **body)
            await hear(ours, type="response.incomplete")


async def test_waiting_message_is_not_parsed_before_its_turn(parsed: list[int]) -> None:
    async with running() as server, socket(server, "responses") as ours:
        await say(ours, type="response.create", **{**ASKED, "max_output_tokens": 10**6})
        await hear(ours, type="response.in_progress")
        del parsed[:]
        await say(ours, type="response.create", **ASKED, instructions=LONG)
        await say(ours, type="nonsense")
        await hear(ours, type="error")
    assert len(parsed) == 2, "only the heads of both were looked at"


@pytest.mark.parametrize("path", ["stream", "responses"])
async def test_rate_is_checked_before_a_message_is_parsed(
    tmp_path: Path, path: str, parsed: list[int]
) -> None:
    async with (
        serving(tmp_path, requests_per_minute=2) as server,  # the handshake is one
        socket(server, path) as ours,
    ):
        await say(ours, type="nonsense", request_id="bad")
        assert (await hear(ours, type="error"))["error"]["code"] == "invalid_value"
        del parsed[:]
        await say(ours, type="generate", request_id="r", prompt=LONG)
        error = await hear(ours, type="error")
    assert error["error"]["code"] == "rate_limited"
    assert not parsed
    if path == "stream":
        assert error["request_id"] == "r"


@pytest.mark.parametrize("bad", ["{", '{"type": "nonsense"}', b"bytes", LONG])
@pytest.mark.parametrize("path", ["stream", "responses"])
async def test_bad_messages_count_against_the_rate(
    tmp_path: Path, path: str, bad: str | bytes
) -> None:
    async with (
        serving(tmp_path, requests_per_minute=4) as server,
        socket(server, path) as ours,
    ):
        for _ in range(3):
            await ours.send(bad)
            assert (await hear(ours, type="error"))["error"]["code"] == "invalid_value"
        await ours.send(bad)
        assert (await hear(ours, type="error"))["error"]["code"] == "rate_limited"


async def test_cancels_count_and_take_effect(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, requests_per_minute=2) as server,
        socket(server, "stream") as ours,
    ):
        await say(ours, type="generate", request_id="r", prompt="a", max_tokens=10**6)
        await hear(ours, type="started")
        for _ in range(3):
            await say(ours, type="cancel", request_id="r")
        assert (await hear(ours, type="finished"))["finish_reason"] == "cancelled"
        refused = await server.http.get("/v1/sessions", headers=KEY)
    # One is due after half a minute; three more were counted, and are unfed.
    assert refused.status_code == 429
    assert float(refused.json()["error"]["retry_after_s"]) > 60


def test_remembered_conversations_are_bounded_by_number_and_bytes() -> None:
    memory = RecentTurns(10_000)
    for index in range(MAX_REMEMBERED + 1):
        memory.keep(Note(f"n{index}", {}, []))
    assert memory.find("n0") is None and memory.find("n1") is not None
    memory.keep(Note("large", {}, [{"text": "a" * 9_500}]))
    turn = memory.find("large")
    assert turn is not None and turn.note.items == [{"text": "a" * 9_500}]
    assert memory.find("n5") is None
    memory.keep(Note("huge", {}, [{"text": "a" * 10_001}]))
    assert memory.find("huge") is None
