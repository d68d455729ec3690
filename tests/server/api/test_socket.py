"""One socket around a codec of the test's own: order, closing, its end; and frames of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter

from server.api.connections import Close, Socket
from server.api.events import FrameWriter, encode
from server.api.schemas.responses import TokenFrame
from server.engine.types import Event, Migrated, Request, SamplingParams, Scored, TokenEvent
from server.errors import InternalFailure, RequestError
from server.runtime.queues import ReaderTooSlow


def token(seq: int) -> TokenEvent:
    return TokenEvent("r", seq=seq, position=seq, token_id=seq, text="a")


class Numbers:
    """A codec that writes the number of a token, and notes what it receives."""

    def __init__(self) -> None:
        self.received: list[str | None] = []
        self.due: Close | None = None

    async def receive(self, text: str | None) -> None:
        self.received.append(text)

    def frames(self, events: Sequence[Event]) -> list[bytes]:
        return [b"%d" % event.seq for event in events if isinstance(event, TokenEvent)]

    def close_due(self) -> Close | None:
        return self.due


class Wire:
    """The client's end."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.to_server: asyncio.Queue[Any] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message.get("text", message.get("code")))

    def socket(self, max_queued_events: int = 100) -> Socket:
        return Socket(max_queued_events, self.to_server.get, self.send, lambda parts: False)


async def test_frames_and_events_leave_in_order_and_nothing_after_a_close() -> None:
    wire, codec = Wire(), Numbers()
    socket = wire.socket()
    socket.event_queue.put([token(1), token(2)])
    socket.reply(b"reply")
    socket.event_queue.put([token(3)])
    socket.close(1012, "over")
    socket.event_queue.put([token(4)])
    await socket.run(codec)
    assert wire.sent == ["1", "2", "reply", "3", 1012]


async def test_codec_closes_after_the_frames_of_its_last_event() -> None:
    wire, codec = Wire(), Numbers()
    codec.due = Close(1012, "moved")
    socket = wire.socket()
    socket.event_queue.put([token(1), Migrated("r", "s", 0, 1, 1)])
    await socket.run(codec)
    assert wire.sent == ["1", 1012]


async def test_messages_reach_the_codec_until_the_client_leaves() -> None:
    wire, codec = Wire(), Numbers()
    for text in ("a", None):
        wire.to_server.put_nowait({"type": "websocket.receive", "text": text})
    wire.to_server.put_nowait({"type": "websocket.disconnect"})
    await wire.socket().run(codec)
    assert codec.received == ["a", None]


@pytest.mark.parametrize(
    ("error", "code"), [(ReaderTooSlow(), 1008), (InternalFailure("stopped"), 1011)]
)
async def test_broken_queue_closes_with_its_reason(error: RequestError, code: int) -> None:
    wire = Wire()
    socket = wire.socket()
    socket.event_queue.fail(error)
    await socket.run(Numbers())
    assert wire.sent == [code]


async def test_spawned_work_is_cancelled_with_its_socket() -> None:
    wire, ended = Wire(), asyncio.Event()
    socket = wire.socket()

    async def work() -> None:
        try:
            wire.to_server.put_nowait({"type": "websocket.disconnect"})
            await asyncio.Event().wait()
        finally:
            ended.set()

    socket.spawn(work())
    await socket.run(Numbers())
    assert ended.is_set()


async def test_failure_of_the_reader_is_not_hidden() -> None:
    class Fails(Numbers):
        async def receive(self, text: str | None) -> None:
            raise ZeroDivisionError

    wire = Wire()
    wire.to_server.put_nowait({"type": "websocket.receive", "text": "a"})
    with pytest.raises(ZeroDivisionError):
        await wire.socket().run(Fails())


REQUEST = Request("ws-1", "ann", (1, 2), SamplingParams())
WORK = FrameWriter("b", REQUEST, str)


def test_token_has_no_more_than_was_asked_for() -> None:
    frame = WORK.frame(TokenEvent("ws-1", 1, 5, 311, " thé"))
    assert frame is not None
    assert json.loads(frame) == {
        "type": "token",
        "request_id": "b",
        "seq": 1,
        "position": 5,
        "token_id": 311,
        "text": " thé",
    }


def test_token_shows_how_probable_it_was_where_that_was_asked_for() -> None:
    plain = WORK.token(TokenEvent("ws-1", 1, 5, 311, "a"))
    rich = WORK.token(TokenEvent("ws-1", 1, 5, 311, "a", -0.25, ((311, -0.25), (17, -2.5))))
    top = [{"token_id": 311, "logprob": -0.25}, {"token_id": 17, "logprob": -2.5}]
    assert json.loads(rich) == {**json.loads(plain), "logprob": -0.25, "top_logprobs": top}
    none = WORK.token(TokenEvent("ws-1", 1, 5, 311, "a", -0.25))
    assert json.loads(none) == {**json.loads(plain), "logprob": -0.25, "top_logprobs": []}


@pytest.mark.parametrize(
    ("request_id", "text", "logprob"),
    [
        ("b", "a", None),
        ('a "name"', "", -0.25),
        ("é", 'a "b"\n\\', None),
        ("b", "é\u2028\x7f", -0.25),
    ],
)
def test_bytes_of_a_token_are_those_of_the_frame_that_is_described(
    request_id: str, text: str, logprob: float | None
) -> None:
    frame: TokenFrame = {
        "type": "token",
        "request_id": request_id,
        "seq": 1,
        "position": 5,
        "token_id": 311,
        "text": text,
    }
    top: tuple[tuple[int, float], ...] = ()
    if logprob is not None:
        frame["logprob"] = logprob
        frame["top_logprobs"] = [{"token_id": 17, "logprob": -2.5}]
        top = ((17, -2.5),)
    written = FrameWriter(request_id, REQUEST, str).token(
        TokenEvent("ws-1", 1, 5, 311, text, logprob, top)
    )
    assert written == encode(frame)
    TypeAdapter(TokenFrame).validate_json(written)


def test_scores_of_a_prompt_have_no_frame() -> None:
    assert WORK.frame(Scored("ws-1", (1,), (None,), ((),))) is None
