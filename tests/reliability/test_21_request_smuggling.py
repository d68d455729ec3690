"""21: a request that two readers could cut differently gets 400; what follows it is not read."""

from __future__ import annotations

import json

import pytest

from benchmarks.websocket import handshake
from tests.server.harness import Running, running

POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
#: What an attacker would have the server take for the next client's request.
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
EMPTY_CHUNKED = b"0\r\n\r\n"


def post(*lines: bytes, body: bytes = EMPTY_CHUNKED) -> bytes:
    return POST + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body + SMUGGLED


def chunked(body: bytes) -> bytes:
    return post(b"transfer-encoding: chunked", body=body)


AMBIGUOUS = {
    "CL.TE": post(b"content-length: 6", b"transfer-encoding: chunked"),
    "TE.CL": post(b"transfer-encoding: chunked", b"content-length: 6"),
    "CL.TE in HTTP/1.0": post(b"content-length: 6", b"transfer-encoding: chunked").replace(
        b"HTTP/1.1", b"HTTP/1.0", 1
    ),
    "two codings": post(b"transfer-encoding: chunked", b"transfer-encoding: identity"),
    "coding after chunked": post(b"transfer-encoding: chunked, identity"),
    "coding before chunked": post(b"transfer-encoding: gzip, chunked"),
    "unknown coding": post(b"transfer-encoding: xchunked"),
    "quoted coding": post(b'transfer-encoding: "chunked"'),
    "space before the colon": post(b"transfer-encoding : chunked"),
    "space before the name": post(b" transfer-encoding: chunked"),
    "vertical tab": post(b"transfer-encoding: \x0bchunked"),
    "NUL after the coding": post(b"transfer-encoding: chunked\0"),
    "NUL in a value": post(b"x: a\0b", b"content-length: 0"),
    "two lengths": post(b"content-length: 0", b"content-length: 5"),
    "list of lengths": post(b"content-length: 0, 5"),
    "length with a plus": post(b"content-length: +5"),
    "negative length": post(b"content-length: -1"),
    "hexadecimal length": post(b"content-length: 0x5"),
    "length with an underscore": post(b"content-length: 1_0"),
    "length with a space": post(b"content-length: 1 0"),
    "length of 30 digits": post(b"content-length: " + b"9" * 30),
    "length of 5,000 digits": post(b"content-length: " + b"9" * 5000),
    "length in other digits": post("content-length: ٣".encode()),
    "empty length": post(b"content-length: "),
    "bare carriage return": post(b"x: y\rcontent-length: 0"),
    "0x chunk": chunked(b"0x1\r\na\r\n0\r\n\r\n"),
    "negative chunk": chunked(b"-1\r\na\r\n0\r\n\r\n"),
    "chunk with a plus": chunked(b"+1\r\na\r\n0\r\n\r\n"),
    "chunk with an underscore": chunked(b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n"),
    "chunk with a space": chunked(b" 1\r\na\r\n0\r\n\r\n"),
    "chunks without carriage returns": chunked(b"1\na\n0\n\n"),
    "chunk longer than it says": chunked(b"1\r\nabc\r\n0\r\n\r\n"),
    "line feed in a chunk's extension": chunked(b"1;a\nb\r\na\r\n0\r\n\r\n"),
    "endless extension": chunked(b"1;" + b"a" * 100_000 + b"\r\na\r\n0\r\n\r\n"),
    "two hosts": b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: y\r\n\r\n" + SMUGGLED,
    "list of hosts": b"GET /health HTTP/1.1\r\nhost: localhost, y\r\n\r\n" + SMUGGLED,
    "no host": b"GET /health HTTP/1.1\r\n\r\n" + SMUGGLED,
    "space in the method": b"GE T /health HTTP/1.1\r\nhost: localhost\r\n\r\n" + SMUGGLED,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED,
    "handshake with a length": handshake(content_length="38") + SMUGGLED,
    "handshake with chunks": handshake(transfer_encoding="chunked") + SMUGGLED,
    "handshake with both": handshake(content_length="5", transfer_encoding="chunked") + SMUGGLED,
}


def first_answer(answer: bytes) -> tuple[int, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body


@pytest.mark.parametrize("data", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_ambiguous_request_gets_400_and_ends_the_connection(data: bytes) -> None:
    async with running() as server:
        answer = await server.exchange(data)
        assert answer.count(b"HTTP/1.1 ") == 1
        status, body = first_answer(answer)
        assert status == 400
        assert json.loads(body)["error"]["code"] == "invalid_value"
        await assert_unharmed(server)


async def test_request_in_a_body_is_body() -> None:
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n" % len(SMUGGLED)
    async with running() as server:
        answer = await server.exchange(head + b"connection: close\r\n\r\n" + SMUGGLED)
        assert answer.count(b"HTTP/1.1 ") == 1


async def test_folded_line_is_part_of_the_value_before_it() -> None:
    """RFC 9112, section 5.2: so no coding comes in through it."""
    folded = POST + b"content-length: 0\r\nx: y\r\n transfer-encoding: chunked\r\n\r\n"
    async with running() as server:
        answer = await server.exchange(folded + LAST)
        assert answer.count(b"HTTP/1.1 ") == 2
        assert answer.endswith(b'{"status":"ok"}')


async def test_pipelined_requests_are_answered_in_order() -> None:
    wanted = b'{"prompt": "hi", "max_tokens": 1}'
    first = POST + b"content-length: %d\r\n\r\n" % len(wanted) + wanted
    async with running() as server:
        answer = await server.exchange(first + SMUGGLED + LAST)
        kinds = [answer.index(what) for what in (b"text_completion", b'"list"', b'"status"')]
        assert kinds == sorted(kinds)
        assert answer.count(b"HTTP/1.1 200") == 3


async def test_garbage_in_a_body_that_was_refused_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer has gone; there is nothing left to say to the rest."""
    body = b"fffff\r\n" + b"x" * 0xFFFFF + b"\r\n1\r\nxx not a chunk\r\n\r\n"
    async with running() as server:
        reader = await server.exchange(post(b"transfer-encoding: chunked", body=body))
        assert first_answer(reader)[0] in (400, 413)
        await assert_unharmed(server)
    assert "Traceback" not in caplog.text


async def assert_unharmed(server: Running) -> None:
    stats = await server.stats()
    assert (stats.prompt_tokens_total, stats.held_slots) == (0, 0)
    assert (await server.http.get("/health")).status_code == 200
