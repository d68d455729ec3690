"""A stream of server-sent events: its head, the direct write, failures, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from server.api.direct_write import EXTENSION
from server.api.event_stream import event_stream, server_sent
from server.api.large_responses import PART_BYTES
from server.engine.types import Event, Failed, TokenEvent
from server.errors import InternalFailure, RequestError
from server.runtime.event_queue import EventQueue


def token(seq: int) -> TokenEvent:
    return TokenEvent("r", seq=seq, position=seq, token_id=seq, text="a")


class Numbers:
    """Writes the number of each token, which must not come twice."""

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def encode(self, events: Sequence[Event]) -> list[bytes]:
        seqs = [event.seq for event in events if isinstance(event, TokenEvent)]
        self.encoded += seqs
        return [b"%d;" % seq for seq in seqs]

    def error(self, error: RequestError) -> bytes:
        return b"error"


class Client:
    """Keeps what is sent, and what takes the direct write, where that is open."""

    def __init__(self, is_open: bool = False) -> None:
        self.sent: list[Any] = []
        self.is_open = is_open
        self.scope = {"type": "http", "extensions": {EXTENSION: self.write}}

    def write(self, parts: Sequence[bytes]) -> bool:
        if self.is_open:
            self.sent.append(b"".join(parts))
        return self.is_open

    async def send(self, message: Any) -> None:
        self.sent.append(message.get("body", message))


async def test_stream_has_one_head_and_one_end() -> None:
    client = Client()
    async with event_stream(client.scope, client.send, Numbers()) as stream:
        await stream.write(b"")
        await stream.write_events([token(1), token(2)])
    head, *body = client.sent
    assert head["status"] == 200
    assert dict(head["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert body == [b"1;2;", b""]


async def test_request_error_is_the_last_event() -> None:
    client = Client()
    async with event_stream(client.scope, client.send, Numbers()):
        raise InternalFailure("stopped")
    assert client.sent[1:] == [b"error", b""]


async def test_any_other_error_leaves_the_body_without_an_end() -> None:
    client = Client()
    with pytest.raises(ZeroDivisionError):
        async with event_stream(client.scope, client.send, Numbers()):
            raise ZeroDivisionError
    assert len(client.sent) == 1


async def test_tokens_take_the_direct_write_and_wake_nobody() -> None:
    client = Client(is_open=True)
    queue: EventQueue[Event] = EventQueue(100)
    async with event_stream(client.scope, client.send, Numbers()) as stream:
        taking = asyncio.create_task(stream.take(queue))
        await asyncio.sleep(0)
        queue.put([token(1)])
        queue.put([token(2), token(3)])
        assert not taking.done()
        end = Failed("r", InternalFailure("stopped"))
        queue.put([end])
        assert await taking == [end]
    assert client.sent[1:] == [b"1;", b"2;3;", b""]


async def test_refused_tokens_are_encoded_once_and_sent_first() -> None:
    client, numbers = Client(), Numbers()
    queue: EventQueue[Event] = EventQueue(100)
    async with event_stream(client.scope, client.send, numbers) as stream:
        taking = asyncio.create_task(stream.take(queue))
        await asyncio.sleep(0)
        queue.put([token(1)])
        queue.put([token(2)])
        await stream.write_events(await taking)
    assert numbers.encoded == [1, 2]
    assert client.sent[1:] == [b"1;", b"2;", b""]


async def test_large_events_are_sent_in_parts() -> None:
    client = Client()
    async with event_stream(client.scope, client.send, Numbers()) as stream:
        await stream.write(b"a" * (PART_BYTES + 1))
    assert [len(body) for body in client.sent[1:]] == [PART_BYTES, 1, 0]


def test_event_has_its_id_and_kind_before_its_data() -> None:
    assert server_sent(b"{}") == b"data: {}\n\n"
    assert server_sent(b"{}", b"done", b"e-1:2") == b"id: e-1:2\nevent: done\ndata: {}\n\n"
