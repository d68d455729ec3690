"""18: a text message that is not UTF-8 closes its socket with 1007, and has no other effect."""

from __future__ import annotations

import pytest

from benchmarks.websocket import CLOSE, CONTINUATION, PING, TEXT, closing, frame
from tests.reliability.raw_websocket import opened
from tests.server.harness import running

NOT_UTF8 = {
    "stray byte": b"\xff",
    "lone continuation": b"\x80",
    "cut off": b"\xe2\x82",
    "overlong slash": b"\xc0\xaf",
    "overlong three": b"\xe0\x80\xaf",
    "surrogate": b"\xed\xa0\x80",
    "beyond Unicode": b"\xf4\x90\x80\x80",
    "Latin-1": "é".encode("latin-1"),
    "UTF-16": "{}".encode("utf-16"),
}
BEFORE = b'{"type": "generate", "request_id": "a", "prompt": "'


@pytest.mark.parametrize("bad", NOT_UTF8.values(), ids=NOT_UTF8.keys())
async def test_text_that_is_not_utf8_closes_with_1007(
    bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as server:
        async with opened(server.port) as client:
            await client.send(frame(TEXT, BEFORE + bad + b'"}'))
            assert await client.close_code() == 1007
        async with opened(server.port) as client:
            await client.send(frame(TEXT, BEFORE + bad, fin=False))
            await client.send(frame(CONTINUATION, b'"}') + frame(PING, b"late"))
            assert await client.close_code() == 1007
        assert (await server.stats()).prompt_tokens_total == 0
    assert "Traceback" not in caplog.text


async def test_close_reason_that_is_not_utf8_closes_with_1007() -> None:
    async with running() as server, opened(server.port) as client:
        await client.send(closing(1000, b"\xff"))
        assert await client.close_code() == 1007


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 2999, 5000])
async def test_close_code_that_may_not_be_sent_closes_with_1002(code: int) -> None:
    async with running() as server, opened(server.port) as client:
        await client.send(closing(code))
        assert await client.close_code() == 1002


async def test_close_frame_of_one_byte_closes_with_1002() -> None:
    async with running() as server, opened(server.port) as client:
        await client.send(frame(CLOSE, b"\x03"))
        assert await client.close_code() == 1002


async def test_character_that_is_cut_between_fragments_is_whole() -> None:
    message = '{"type": "create", "request_id": "a€𐍈é"}'.encode()
    async with running() as server, opened(server.port) as client:
        await client.send(frame(TEXT, message[:1], fin=False))
        for index in range(1, len(message)):
            await client.send(frame(CONTINUATION, message[index : index + 1], fin=False))
        await client.send(frame(CONTINUATION))
        created = await client.receive_json()
        assert (created["type"], created["request_id"]) == ("created", "a€𐍈é")
