"""24: JSON that is made to hurt its parser is a 4xx like any other mistake."""

from __future__ import annotations

import json

import pytest

from benchmarks.websocket import TEXT, frame
from tests.reliability.raw_websocket import opened
from tests.reliability.test_22_bad_values import watched
from tests.server.harness import running

DEEP = 100_000
DIGITS = b"9" * 5000

#: A body, and the field that its error must name; None where it is no JSON at all.
HOSTILE: dict[str, tuple[bytes, str | None]] = {
    "deep list": (b"[" * DEEP, None),
    "deep closed list": (b"[" * DEEP + b"]" * DEEP, None),
    "deep object": (b'{"a":' * DEEP, None),
    "deep closed object": (b'{"a":' * DEEP + b"1" + b"}" * DEEP, None),
    "deep prompt": (b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", None),
    "deep unknown field": (b'{"prompt": "x", "z": ' + b"[" * DEEP + b"]" * DEEP + b"}", None),
    "not so deep prompt": (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "prompt[0][0]"),
    "5,000 digits": (b'{"prompt": "x", "seed": ' + DIGITS + b"}", None),
    "minus 5,000 digits": (b'{"prompt": "x", "seed": -' + DIGITS + b"}", None),
    "5,000 decimals": (b'{"prompt": "x", "top_p": 1.' + DIGITS + b"}", "top_p"),
    "huge exponent": (b'{"prompt": "x", "top_p": 1e' + DIGITS + b"}", None),
    "5,000 digits in a prompt": (b'{"prompt": [' + DIGITS + b"]}", None),
    "lone high surrogate": (b'{"prompt": "\\ud800"}', None),
    "lone low surrogate": (b'{"prompt": "\\udc00"}', None),
    "surrogates in the wrong order": (b'{"prompt": "\\udc00\\ud800"}', None),
    "lone surrogate in a stop": (b'{"prompt": "x", "stop": "\\ud800"}', None),
    "lone surrogate in a name": (b'{"prompt": "x", "\\ud800": 1}', None),
    "raw surrogate": (b'{"prompt": "\xed\xa0\x80"}', None),
    "raw NUL in a string": (b'{"prompt": "a\0b"}', None),
    "raw NUL after the value": (b'{"prompt": "x"}\0', None),
    "raw NUL before the value": (b'\0{"prompt": "x"}', None),
    "raw control character": (b'{"prompt": "a\x01b"}', None),
    "NUL in an unknown name": (b'{"prompt": "x", "\\u0000": 1}', "\0"),
    "no UTF-8": (b'{"prompt": "\xff"}', None),
    "UTF-16": (b"\xff\xfe{\0}\0", None),
    "two byte order marks": (b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "x"}', None),
    "100,000 unknown fields": (
        json.dumps({"prompt": "x"} | {f"f{index}": 1 for index in range(70_000)}).encode(),
        "f0",
    ),
    "two values": (b'{"prompt": "x"} {"prompt": "y"}', None),
    "comment": (b'{"prompt": "x" /* y */}', None),
    "comma at the end": (b'{"prompt": "x",}', None),
    "single quotes": (b"{'prompt': 'x'}", None),
    "nothing": (b"", None),
}


@pytest.mark.parametrize(("body", "param"), HOSTILE.values(), ids=HOSTILE.keys())
async def test_hostile_json_is_a_400(body: bytes, param: str | None) -> None:
    async with watched() as (server, _), opened(server.port) as client:
        answer = await server.http.post("/v1/completions", content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_value"), answer.text
        assert len(error["message"]) < 500
        if param is not None:
            assert error["param"] == param
        message = body.replace(b"{", b'{"type": "generate", "request_id": "a", ', 1)
        await client.send(frame(TEXT, message))
        if not is_utf8(message):
            assert await client.close_code() == 1007
            return
        reply = await client.receive_json()
        assert (reply["type"], reply["status"]) == ("error", 400)
        await client.ask(type="cancel", request_id="a")
        await client.ask(type="delete", request_id="b", session="none")
        assert (await client.receive_json())["status"] == 404


async def test_key_that_comes_twice_counts_once() -> None:
    """RFC 8259 leaves it open; here the last one counts, and both are checked as one."""
    async with watched() as (server, _):
        body = b'{"prompt": "x", "max_tokens": 1, "max_tokens": -2}'
        answer = await server.http.post("/v1/completions", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "max_tokens"


async def test_escaped_nul_is_a_character_of_a_text_and_none_of_a_name() -> None:
    async with running() as server:
        answer = await server.http.post(
            "/v1/completions", content=b'{"prompt": "a\\u0000b", "max_tokens": 1}'
        )
        assert answer.json()["usage"]["prompt_tokens"] == 3
        answer = await server.http.post(
            "/v1/completions", content=b'{"prompt": "a", "session": "\\u0000"}'
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session")


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
