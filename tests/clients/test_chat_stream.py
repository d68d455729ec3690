"""What `everstream chat` reads: lines end as those of server-sent events, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from clients.chat.chat_branch import ChatAnswer, lines_of

#: All that `str.splitlines` ends a line at, but for what JSON escapes.
SEPARATORS = "one\u0085two\u2028three\u2029four"


class Pieces(httpx.SyncByteStream):
    """A body that comes in pieces of ``size`` bytes."""

    def __init__(self, body: bytes, size: int) -> None:
        self._body, self._size = body, size

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._body), self._size):
            yield self._body[start : start + self._size]


def chunk(**delta: str) -> bytes:
    choice = {"index": 0, "delta": delta}
    usage = {"completion_tokens": 1, "total_tokens": 2}
    return json.dumps({"choices": [choice], "usage": usage}, ensure_ascii=False).encode()


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_separators_of_unicode_stay_within_an_answer(size: int, end: bytes) -> None:
    deltas = [{"reasoning_content": SEPARATORS}, {"content": SEPARATORS}]
    parts = [b": keep-alive", b"", *(b"data: " + chunk(**delta) for delta in deltas), b""]
    body = end.join([*parts, b"data: [DONE]", b"", b""])
    answers = httpx.MockTransport(lambda request: httpx.Response(200, stream=Pieces(body, size)))
    with (
        httpx.Client(base_url="http://server", transport=answers) as http,
        ChatAnswer(http, {"messages": []}) as answer,
    ):
        assert list(answer) == [("", SEPARATORS), (SEPARATORS, "")]


def test_lines_end_by_a_newline_a_return_or_both() -> None:
    pieces = [b"a\r", b"\nb\nc", b"\rd\x0b\x0c\x1c\n", b"rest"]
    assert [line for line in lines_of(pieces) if line] == [b"a", b"b", b"c", b"d\x0b\x0c\x1c"]
