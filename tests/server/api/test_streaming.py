"""A stream of server-sent events: its head, failures and end; tokens that are written directly."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from server.api.answers import PART_BYTES, DirectWriter, send_stream, server_sent
from server.engine.types import Event, Failed, TokenEvent
from server.errors import InternalFailure, RequestError
from server.runtime.queues import EventQueue
from tests.waiting import started_task


def token(seq: int) -> TokenEvent:
    return TokenEvent("r", seq=seq, position=seq, token_id=seq, text="a")


async def sent(*pieces: bytes, failure: Exception | None = None, into: list[Any]) -> None:
    """Sends a stream ``into`` a list: its head, then the bodies."""

    async def all_pieces() -> AsyncGenerator[bytes, None]:
        for piece in pieces:
            yield piece
        if failure is not None:
            raise failure

    async def send(message: Any) -> None:
        into.append(message.get("body", message))

    def error(error: RequestError) -> bytes:
        return b"error"

    await send_stream(send, all_pieces(), error)


async def test_stream_has_one_head_and_one_end() -> None:
    messages: list[Any] = []
    await sent(b"", b"1;2;", into=messages)
    head, *body = messages
    assert head["status"] == 200
    assert dict(head["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert body == [b"1;2;", b""]


async def test_request_error_is_the_last_event() -> None:
    messages: list[Any] = []
    await sent(b"1;", failure=InternalFailure("stopped"), into=messages)
    assert messages[1:] == [b"1;", b"error", b""]


async def test_any_other_error_leaves_the_body_without_an_end() -> None:
    messages: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        await sent(failure=ZeroDivisionError(), into=messages)
    assert len(messages) == 1


async def test_large_events_are_sent_in_parts() -> None:
    messages: list[Any] = []
    await sent(b"a" * (PART_BYTES + 1), into=messages)
    assert [len(body) for body in messages[1:]] == [PART_BYTES, 1, 0]


class Written:
    """What takes the direct write, where that is open. No token may be encoded twice."""

    def __init__(self, is_open: bool) -> None:
        self.is_open, self.parts, self.encoded = is_open, list[bytes](), list[int]()
        self.queue: EventQueue[Event] = EventQueue(100)
        self.direct = DirectWriter(self.queue, self._write, self._encode)

    def _encode(self, tokens: Sequence[TokenEvent]) -> list[bytes]:
        self.encoded += [token.seq for token in tokens]
        return [b"%d;" % token.seq for token in tokens]

    def _write(self, parts: Sequence[bytes]) -> bool:
        if self.is_open:
            self.parts += parts
        return self.is_open


async def test_tokens_use_the_direct_write_and_wake_no_task() -> None:
    written = Written(is_open=True)
    queue = written.queue
    taking = await started_task(written.direct.take())
    queue.put([token(1)])
    queue.put([token(2), token(3)])
    assert not taking.done()
    rest = [token(4), Failed("r", InternalFailure("stopped"))]
    queue.put(rest)  # not all of them are tokens
    assert await taking == ([], rest)
    assert written.parts == [b"1;", b"2;", b"3;"]


async def test_refused_tokens_are_encoded_once_and_come_first() -> None:
    written = Written(is_open=False)
    queue = written.queue
    taking = await started_task(written.direct.take())
    queue.put([token(1)])
    queue.put([token(2)])
    assert await taking == ([b"1;"], [token(2)])
    queue.put([token(3)])
    assert await written.direct.take() == ([], [token(3)])
    assert written.encoded == [1]


def test_event_has_its_id_and_kind_before_its_data() -> None:
    assert server_sent(b"{}") == b"data: {}\n\n"
    assert server_sent(b"{}", b"done", b"e-1:2") == b"id: e-1:2\nevent: done\ndata: {}\n\n"
