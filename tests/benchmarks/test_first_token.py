"""The time to the first token: what counts as asking, and as a token."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks.server_cost.first_token import FirstToken
from benchmarks.sessions.prompts import _story
from benchmarks.wire import Opening


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))


@pytest.mark.parametrize("piece", [1, 7, 100])
async def test_token_is_seen_however_it_arrives(piece: int) -> None:
    probe, transport = FirstToken(Opening(b"ask", mark=b'"content":')), Transport()
    probe.connection_made(transport)
    answer = b'HTTP/1.1 200 OK\r\n\r\ndata: {"role":"assistant"}\n\ndata: {"content":"a"}\n\n'
    for start in range(0, len(answer), piece):
        is_due = b'"content":' in answer[:start]
        assert probe.seconds.done() == is_due
        probe.data_received(answer[start : start + piece])
    assert await probe.seconds > 0
    assert transport.written == [b"ask"]


async def test_socket_asks_after_its_handshake() -> None:
    probe, transport = FirstToken(Opening(b"handshake", b"ask")), Transport()
    probe.connection_made(transport)
    probe.data_received(b'101 "position":')
    assert not probe.seconds.done(), "that is the answer to the handshake"
    assert transport.written == [b"handshake", b"ask"]
    probe.data_received(b'{"type":"token","position":1}')
    assert probe.seconds.done()


async def test_connection_that_ends_before_is_an_error() -> None:
    probe = FirstToken(Opening(b"ask"))
    probe.connection_made(Transport())
    probe.data_received(b"HTTP/1.1 503")
    probe.connection_lost(None)
    with pytest.raises(ConnectionError, match="503"):
        await probe.seconds


def test_story_has_as_many_characters_as_were_asked_for() -> None:
    draw = random.Random(0)
    stories = [_story(draw, 1000) for _ in range(2)]
    assert [len(story) for story in stories] == [1000, 1000]
    assert stories[0] != stories[1]
