"""The frames of a socket, from events to JSON."""

from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter

from server.api.frames import FrameWriter, encode
from server.api.schemas.frame_models import TokenFrame
from server.engine.types import Request, SamplingParams, Scored, TokenEvent

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
