"""``echo``, ``logprobs`` and ``prompt_logprobs``, as evaluation harnesses read them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import most_likely, score_of
from tests.server.api.talk import kept, settled, story, usage_of, values_of
from tests.server.harness import Running

TEXT = "The café, at 8"


def harness_scores(answer: dict[str, Any], ctxlens: list[int]) -> list[tuple[float, bool]]:
    """What a well-known harness makes of an answer: the last token is the one generated."""
    found = []
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, ctxlen in zip(choices, ctxlens, strict=True):
        values = choice["logprobs"]["token_logprobs"][ctxlen:-1]
        tops = choice["logprobs"]["top_logprobs"][ctxlen:-1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        found.append((sum(values), greedy))
    return found


async def test_evaluation_harness_reads_likelihood_and_greediness(server: Running) -> None:
    likely, unlikely = [0, 8, 16, 24], [0, 8, 17, 24]
    response = await server.generate(
        model="fake",
        prompt=[[65, *likely], [65, 66, *unlikely], [*b"THE EN", 68]],
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    assert harness_scores(response.json(), [1, 2, 3]) == [
        (sum(map(score_of, likely)), True),
        (sum(map(score_of, unlikely)), False),
        (sum(map(score_of, b" END")), False),
    ]
    assert response.json()["choices"][2]["logprobs"]["tokens"][-1] == "<|endoftext|>"


async def test_token_of_a_prompt_that_begins_a_text_has_null(server: Running) -> None:
    response = await server.generate(prompt=[104, 105], max_tokens=1, echo=True, logprobs=0, seed=0)
    (choice,) = response.json()["choices"]
    assert choice["text"] == "hi" + story(2, 1)
    assert choice["logprobs"] == {
        "tokens": ["h", "i", story(2, 1)],
        "token_logprobs": [None, score_of(105), score_of(ord(story(2, 1)))],
        "top_logprobs": [
            None,
            {"i": score_of(105)},
            {story(2, 1): score_of(ord(story(2, 1)))},
        ],
        "text_offset": [0, 1, 2],
    }


async def test_offsets_are_places_in_the_text_with_the_echo(server: Running) -> None:
    answer = await server.generate(prompt=TEXT, max_tokens=30, echo=True, logprobs=2, seed=30)
    (choice,) = answer.json()["choices"]
    found, text = choice["logprobs"], choice["text"]
    assert text.startswith(TEXT)
    assert len(found["tokens"]) == len(TEXT.encode()) + 30
    for name, place in zip(found["tokens"], found["text_offset"], strict=True):
        if not name.startswith("bytes:"):
            assert text[place] == name
    assert "bytes:\\xc3" in found["tokens"]
    assert all(len(top) in (2, 3) for top in found["top_logprobs"][1:])


async def test_echo_alone_is_text_alone(server: Running) -> None:
    answer = (await server.generate(prompt="hi", max_tokens=5, seed=0, echo=True)).json()
    assert answer["choices"][0]["text"] == "hi" + story(2, 5)
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == 2


async def test_logprobs_without_echo_are_of_what_was_generated(server: Running) -> None:
    answer = (await server.generate(prompt="hi", max_tokens=5, seed=0, logprobs=3)).json()
    found = answer["choices"][0]["logprobs"]
    text = story(2, 5)
    assert found["tokens"] == list(text)
    assert found["token_logprobs"] == [score_of(ord(letter)) for letter in text]
    assert found["text_offset"] == [0, 1, 2, 3, 4]
    names = {id: chr(id) for id, _ in most_likely(3)}
    best = {names[id]: value for id, value in most_likely(3)}
    assert found["top_logprobs"] == [best | {t: score_of(ord(t))} for t in text]


async def test_top_logprobs_is_another_name(server: Running) -> None:
    one = await server.generate(prompt="hi", max_tokens=5, seed=0, logprobs=3)
    other = await server.generate(prompt="hi", max_tokens=5, seed=0, top_logprobs=3)
    assert one.json()["choices"] == other.json()["choices"]


async def test_max_tokens_zero_with_echo_only_scores_the_prompt(server: Running) -> None:
    answer = (await server.generate(prompt="hi", max_tokens=0, echo=True, logprobs=1)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], answer["seed"]) == ("hi", "length", None)
    assert choice["logprobs"]["token_logprobs"] == [None, score_of(105)]
    assert answer["usage"] == usage_of(2, 0)
    assert (await settled(server)).held_slots == 0


async def test_nothing_is_generated_without_echo_too(server: Running) -> None:
    response = await server.generate(prompt="hi", max_tokens=0)
    assert response.json()["choices"][0]["text"] == ""


async def test_prompt_logprobs_are_by_id(server: Running) -> None:
    answer = await server.generate(prompt="hi", max_tokens=1, seed=0, prompt_logprobs=1)
    (choice,) = answer.json()["choices"]
    best = {"logprob": score_of(0), "rank": 1, "decoded_token": "\0"}
    own = {"logprob": score_of(105), "rank": None, "decoded_token": "i"}
    assert choice["prompt_logprobs"] == [None, {"0": best, "105": own}]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("n", [1, 3])
async def test_stream_equals_the_whole_answer(server: Running, n: int) -> None:
    body = {"prompt": "hey", "max_tokens": 6, "seed": 0, "echo": True, "logprobs": 2, "n": n}
    body |= {"prompt_logprobs": 1}
    whole = (await server.generate(**body)).json()["choices"]
    chunks = values_of(await server.generate(**body, stream=True))
    for expected in whole:
        choices = [
            c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]
        ]
        assert "".join(choice["text"] for choice in choices) == expected["text"]
        found = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        for name, values in expected["logprobs"].items():
            assert [item for part in found for item in part[name]] == values, name
        assert choices[0]["prompt_logprobs"] == expected["prompt_logprobs"]


async def test_benchmark_reads_a_chunk_for_each_token_and_usage_at_the_end(server: Running) -> None:
    response = await server.generate(
        model="fake",
        prompt="hi",
        repetition_penalty=1.0,
        max_tokens=8,
        logprobs=None,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        ignore_eos=True,
        stop=None,
    )
    *chunks, last = values_of(response)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [*range(1, 9), 8]
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == usage_of(2, 8)


async def test_continued_session_has_a_logprob_for_every_token(server: Running) -> None:
    session = await kept(server)
    answer = await server.generate(
        session=session, prompt="hi", max_tokens=1, echo=True, logprobs=0, seed=0
    )
    found = answer.json()["choices"][0]["logprobs"]
    assert found["tokens"][:2] == ["h", "i"]
    assert found["token_logprobs"][:2] == [score_of(104), score_of(105)]


async def test_stop_string_is_not_shown_and_its_tokens_are(server: Running) -> None:
    """As many tokens as usage counts, whatever of their text is shown."""
    answer = await server.generate(prompt="hi", max_tokens=400, seed=0, stop="fox", logprobs=0)
    (choice,) = answer.json()["choices"]
    assert not choice["text"].endswith("fox")
    assert "".join(choice["logprobs"]["tokens"]).endswith("fox")
    assert len(choice["logprobs"]["tokens"]) == answer.json()["usage"]["completion_tokens"]
