"""What `everstream chat` reads: lines end as those of server-sent events, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from clients.chat.chat_answer import ChatAnswer

#: All that `str.splitlines` ends a line at, but for what JSON escapes.
SEPARATORS = "one\u0085two\u2028three\u2029four"


class Pieces(httpx.SyncByteStream):
    """A body that comes in pieces of ``size`` bytes."""

    def __init__(self, body: bytes, size: int) -> None:
        self._body, self._size = body, size

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._body), self._size):
            yield self._body[start : start + self._size]


def event(number: int, kind: str, **fields: object) -> bytes:
    values = {"type": f"response.{kind}", "sequence_number": number, **fields}
    return json.dumps(values, ensure_ascii=False).encode()


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_separators_of_unicode_stay_within_an_answer(size: int) -> None:
    response = {"id": "resp_1", "usage": {"output_tokens": 2, "total_tokens": 5}}
    events = [
        event(0, "created", response={"id": "resp_1"}),
        event(1, "reasoning_text.delta", delta=SEPARATORS),
        event(2, "output_text.delta", delta=SEPARATORS),
        event(3, "completed", response=response),
    ]
    body = b": keep-alive\n\n" + b"".join(b"data: " + each + b"\n\n" for each in events)

    def answer_to(request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            return httpx.Response(200)
        headers = {"content-type": "text/event-stream; charset=utf-8"}
        return httpx.Response(200, headers=headers, stream=Pieces(body, size))

    with (
        httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer_to)) as http,
        ChatAnswer(http, {"input": []}, "key") as answer,
    ):
        pieces = [piece for piece in answer if piece.text or piece.thought]
    assert [(piece.text, piece.thought) for piece in pieces] == [("", SEPARATORS), (SEPARATORS, "")]
    assert (answer.num_tokens, answer.position) == (2, 5)
