"""Log-probabilities as clients of OpenAI's first API and of vLLM read them."""

from __future__ import annotations

import math

import pytest

from server.api.openai.choices import LEAST, LegacyLogprobs, ScoredPrompt, TokenNames
from server.api.openai.choices import prompt_logprobs as written
from server.engine.types import Finished, Request, Scored, Usage
from tests.fakes import EOS, ByteTokenizer

NAMES = TokenNames(ByteTokenizer())
DASH = (0xE2, 0x80, 0x93)


def legacy(tokens: list[int], num_top: int = 1, offset: int = 0) -> dict[str, list[object]]:
    return LegacyLogprobs(NAMES, num_top, offset).of((id, -1.0, ()) for id in tokens)


def test_token_that_is_no_whole_character_is_shown_as_bytes() -> None:
    assert [NAMES[id] for id in DASH] == ["bytes:\\xe2", "bytes:\\x80", "bytes:\\x93"]
    assert (NAMES[ord("a")], NAMES[EOS]) == ("a", "<|endoftext|>")


def test_offsets_count_characters_that_are_whole_before_a_token() -> None:
    found = legacy([ord("a"), *DASH, ord("b"), EOS, ord("c")], offset=5)
    assert found["text_offset"] == [5, 6, 6, 6, 7, 8, 8]


@pytest.mark.parametrize("data", [b"a\xff\xfeb", b"\xe2a", b"\xe2\x80\xe2\x80\x93"])
def test_offsets_are_places_in_the_text_that_is_shown(data: bytes) -> None:
    text, found = data.decode(errors="replace"), legacy([*data, ord("!")])
    assert found["text_offset"][-1] == len(text)


def test_most_probable_tokens_and_the_token_itself_have_equal_logprobs() -> None:
    tops = ((ord("x"), -0.25), (ord("y"), -1.5), (ord("z"), -2.0))
    writer = LegacyLogprobs(NAMES, 2)
    found = writer.of([(ord("x"), -0.25, tops), (ord("q"), -7.125, tops)])
    assert found["tokens"] == ["x", "q"]
    assert found["token_logprobs"] == [-0.25, -7.125]
    assert found["top_logprobs"] == [
        {"x": -0.25, "y": -1.5},
        {"x": -0.25, "y": -1.5, "q": -7.125},
    ]


def test_no_others_are_named_where_none_are_asked_for() -> None:
    found = LegacyLogprobs(NAMES, 0).of([(ord("q"), -7.0, ((ord("x"), -0.25),))])
    assert found["top_logprobs"] == [{"q": -7.0}]


def test_of_two_ids_with_one_name_the_more_probable_one_is_shown() -> None:
    class Twins(ByteTokenizer):
        def token_bytes(self, id: int) -> bytes:
            return b"a"

    found = LegacyLogprobs(TokenNames(Twins()), 2).of([(3, -9.0, ((1, -0.5), (2, -1.0)))])
    assert found["top_logprobs"] == [{"a": -0.5}]
    assert found["token_logprobs"] == [-9.0]


def test_what_begins_a_text_has_null_and_what_cannot_be_a_number_of_json() -> None:
    found = LegacyLogprobs(NAMES, 1).of([(1, None, ()), (2, -math.inf, ((3, -0.1),))])
    assert found["token_logprobs"] == [None, LEAST]
    assert found["top_logprobs"][0] is None


def finished(tokens: int, logprobs: tuple[float, ...]) -> Finished:
    return Finished("r", None, 0, tokens, "", None, Usage(tokens, 0), logprobs=logprobs)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            Scored("r", (7, 8), (None, -1.0), ((), ())),
            ScoredPrompt(0, (7, 8), (None, -1.0), ((), ())),
        ),
        (
            Scored("r", (EOS, 7, 8), (None, -2.0, -1.0), ((), (), ())),
            ScoredPrompt(1, (7, 8), (-2.0, -1.0), ((), ())),
        ),
        (finished(2, (-1.0,)), ScoredPrompt(0, (7, 8), (None, -1.0), ((), ()))),
        (finished(3, (-2.0, -1.0)), ScoredPrompt(1, (7, 8), (-2.0, -1.0), ((), ()))),
    ],
    ids=["ids", "text", "ids that are only fed", "text that is only fed"],
)
def test_start_token_comes_before_the_prompt(
    event: Scored | Finished, expected: ScoredPrompt
) -> None:
    assert ScoredPrompt.of(Request("r", "me", (7, 8), None), event) == expected


def test_prompt_s_are_by_id_and_the_start_token_has_none() -> None:
    prompt = ScoredPrompt(1, (ord("a"), ord("b")), (-0.5, -3.0), (((97, -0.5),), ((97, -0.25),)))
    assert written(prompt, NAMES, 1) == [
        None,
        {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}},
        {
            "97": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": -3.0, "rank": None, "decoded_token": "b"},
        },
    ]
