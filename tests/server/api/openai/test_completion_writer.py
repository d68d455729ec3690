"""Chunks and whole answers made of the engine's events, without an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import sse
from server.api.openai.choices import TokenNames
from server.api.openai.completions import CompletionWriter, Shown
from server.api.schemas.requests import StreamOptions
from server.engine.types import (
    Event,
    Failed,
    Finished,
    Request,
    SamplingParams,
    Scored,
    Started,
    TokenEvent,
    Usage,
)
from server.errors import QueueFull, RequestError
from tests.fakes import ByteTokenizer

NAMES = TokenNames(ByteTokenizer())
ALL_ALONG = StreamOptions(include_usage=True, continuous_usage_stats=True)
TOP = ((ord("e"), -0.5), (ord("t"), -1.0))


def request(name: str = "r", prompt: str = "ab", **more: Any) -> Request:
    fields = {"sampling": SamplingParams(seed=7, top_logprobs=1), **more}
    return Request(name, "me", tuple(prompt.encode()), start=False, **fields)


def token(id: str, seq: int, text: str, prompt: int = 2) -> TokenEvent:
    return TokenEvent(id, seq, prompt + seq - 1, ord(text), text, -0.25 * seq, TOP)


def end(id: str, generated: int, prompt: int = 2, **more: Any) -> Finished:
    usage = Usage(prompt, generated)
    position = prompt + generated
    return Finished(id, None, generated + 1, position, "", "length", usage, **more)


def events(id: str = "r", text: str = "cd") -> list[Event]:
    tokens = [token(id, seq, letter) for seq, letter in enumerate(text, 1)]
    return [Started(id, "s", 0), *tokens, end(id, len(text))]


def scored(id: str = "r", prompt: str = "ab") -> Scored:
    size = len(prompt)
    return Scored(
        id, tuple(prompt.encode()), (None, *[-2.0] * (size - 1)), ((), *[TOP] * (size - 1))
    )


def writer(*requests: Request, **shown: Any) -> CompletionWriter:
    return CompletionWriter(requests, "fake", 5, shown=Shown(names=NAMES, **shown))


def whole(made: CompletionWriter, happened: list[Event]) -> Any:
    for event in happened:
        made.add(event)
    return json.loads(b"".join(made.whole()))


def values(chunks: bytes) -> list[dict[str, Any]]:
    return [event.value for event in sse.events_of(chunks) if event.data != sse.DONE]


def streamed(made: CompletionWriter, happened: list[Event]) -> list[dict[str, Any]]:
    chunks = map(made.chunks, happened)
    parts = [each if isinstance(each, bytes) else b"".join(each) for each in chunks]
    return values(b"".join(parts) + made.end())


def test_character_that_the_prompt_leaves_unfinished_ends_with_it() -> None:
    """What is generated begins a text of its own, behind the echo."""
    fed = Request("r", "me", (0x61, 0xC3), SamplingParams(top_logprobs=1), start=False, score=True)
    happened: list[Event] = [
        Started("r", "s", 0),
        Scored("r", (0x61, 0xC3), (None, -2.0), ((), TOP)),
        token("r", 1, "c"),
        token("r", 2, "d"),
        end("r", 2),
    ]
    fields: dict[str, Any] = {"echo": ("a\ufffd",), "logprobs": 1}
    (choice,) = whole(writer(fed, **fields), happened)["choices"]
    assert choice["logprobs"]["tokens"] == ["a", "bytes:\\xc3", "c", "d"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    chunks = streamed(writer(fed, **fields), happened)
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [place for part in found if part for place in part["text_offset"]] == [0, 1, 2, 3]


def test_echo_without_logprobs_comes_before_the_first_token() -> None:
    chunks = streamed(writer(request(), echo=("ab",)), events())
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["ab", "c", "d", ""]


def test_every_choice_begins_with_the_echo() -> None:
    both = request(num_choices=2)
    happened = [*events("r"), Started("r/1", "s", 2), token("r/1", 1, "x"), end("r/1", 1, 0)]
    texts = {0: "", 1: ""}
    for chunk in streamed(writer(both, num=2, echo=("ab",)), happened):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "abcd", 1: "abx"}


def test_choices_are_numbered_prompt_by_prompt() -> None:
    both = [request("r", num_choices=2), request("q", "xyz", num_choices=2)]
    happened: list[Event] = []
    for id, text in (("q", "12"), ("r", "56"), ("r/1", "34"), ("q/1", "78")):
        happened += events(id, text) if "/" not in id else events(id, text)[1:]
    made = whole(writer(*both, num=2, echo=("ab", "xyz")), happened)
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in made["choices"]] == ["ab56", "ab34", "xyz12", "xyz78"]
    assert made["usage"]["completion_tokens"] == 8
    assert (made["position"], made["id"]) == (None, "r")
    chunks = streamed(writer(*both, num=2, echo=("ab", "xyz")), happened)
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "ab56", 1: "ab34", 2: "xyz12", 3: "xyz78"}


def test_best_are_chosen_for_each_prompt() -> None:
    both = [request("r", num_choices=2), request("q", num_choices=2)]
    happened: list[Event] = [
        *events("r", "a")[:-1],
        end("r", 1, logprob_sum=-3.0),
        token("r/1", 1, "b"),
        end("r/1", 1, 0, logprob_sum=-1.0),
        *events("q", "c")[:-1],
        end("q", 1, logprob_sum=-1.0),
        token("q/1", 1, "d"),
        end("q/1", 1, 0, logprob_sum=-3.0),
    ]
    made = whole(writer(*both, num=1), happened)
    assert [(choice["index"], choice["text"]) for choice in made["choices"]] == [(0, "b"), (1, "c")]


def test_prompt_that_is_only_fed_has_its_logprobs() -> None:
    fed = request(score=True, sampling=None)
    last = Finished("r", None, 0, 2, "", None, Usage(2, 0), logprobs=(-2.0,), tops=(TOP,))
    happened: list[Event] = [Started("r", "s", 0), last]
    fields: dict[str, Any] = {"echo": ("ab",), "logprobs": 1}
    made = whole(writer(fed, **fields), happened)
    (choice,) = made["choices"]
    assert (choice["text"], choice["finish_reason"], made["seed"]) == ("ab", "length", None)
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0]
    (chunk,) = streamed(writer(fed, **fields), happened)
    assert chunk["choices"] == [choice]


def test_each_chunk_has_running_usage_and_the_last_the_total() -> None:
    made = writer(request(), options=ALL_ALONG)
    found = [chunk["usage"]["total_tokens"] for chunk in streamed(made, events())]
    assert found == [3, 4, 4, 4]
    found = [chunk["usage"]["prompt_tokens"] for chunk in streamed(made, events())]
    assert found[-1] == 2


def test_plain_chunk_is_the_same_by_either_way() -> None:
    """The template that most tokens take, and the dictionaries of those with more to say."""
    plain = values(writer(request()).token(token("r", 1, "c")))
    (detailed,) = values(writer(request(), options=ALL_ALONG).token(token("r", 1, "c")))
    del detailed["usage"]
    assert plain == [detailed]
    assert list(plain[0]) == list(detailed)


def test_one_prompt_that_fails_fails_the_answer_and_is_named_in_a_stream() -> None:
    both = [request("r"), request("q")]
    happened = [*events("r"), Failed("q", QueueFull("full"))]
    with pytest.raises(RequestError, match="full"):
        whole(writer(*both), happened)
    *chunks, last = streamed(writer(*both, options=StreamOptions(include_usage=True)), happened)
    assert last["error"]["code"] == "queue_full"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_epoch_is_that_of_the_store_in_which_the_session_has_begun() -> None:
    """The store may become another one while the request is on its way."""
    store = "old"
    kept = Request("r", "me", (1,), SamplingParams(), keep=True)
    one = CompletionWriter((kept,), "fake", 5, lambda epoch: f"{store}-{epoch}")
    store = "new"
    one.chunks(Started("r", "s", 1, 0))
    assert one.token(TokenEvent("r", 1, 1, 65, "A")).startswith(b"id: new-0:1\n")
