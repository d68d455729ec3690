"""Likelihoods, scores and vectors of a real, tiny model: each route says the same of one text."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.server.api.openai.test_completion_logprobs import harness_scores
from tests.server.served import Served, served
from tests.tiny import write_model

TEXT = "Once upon a time there was a fox. The café was closed."


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = write_model(tmp_path_factory.mktemp("model") / "tiny")
    async with served(f"tiny={folder}") as found:
        yield found


async def post(server: Served, path: str, **body: Any) -> dict[str, Any]:
    response = await server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def ids_of(server: Served, text: str, start: bool = True) -> list[int]:
    answer = await post(server, "/tokenize", prompt=text, add_special_tokens=start)
    tokens: list[int] = answer["tokens"]
    return tokens


async def test_what_the_model_chooses_is_greedy_to_a_harness(server: Served) -> None:
    context = await ids_of(server, TEXT)
    greedy = {"temperature": 0, "max_tokens": 8, "logprobs": 1, "ignore_eos": True}
    made = await post(server, "/v1/completions", prompt=context, **greedy)
    found = made["choices"][0]["logprobs"]
    assert all(
        value == max(top.values())
        for value, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True)
    )
    scores = await post(server, "/v1/score", prompt=context, continuations=[[5, 6, 7]], top=1)
    (best, _) = scores["data"][0]["top_logprobs"][0][0]
    others = [(best + 1) % 50, best]
    answer = await post(
        server,
        "/v1/completions",
        prompt=[[*context, other] for other in others],
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    (_, unlikely), (_, likely) = harness_scores(answer, [len(context)] * 2)
    assert (unlikely, likely) == (False, True)


async def test_likelihood_is_the_same_by_every_route(server: Served) -> None:
    context, rest = await ids_of(server, TEXT), await ids_of(server, " The end", start=False)
    body = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
    answer = await post(server, "/v1/completions", prompt=[[*context, *rest]], **body)
    ((expected, greedy),) = harness_scores(answer, [len(context)])
    for prompt, continuation in ((TEXT, " The end"), (context, rest)):
        scores = await post(server, "/v1/score", prompt=prompt, continuations=[continuation, "x"])
        found = scores["data"][0]
        assert found["logprob"] == pytest.approx(expected, rel=1e-5)
        assert (found["tokens"], found["is_greedy"]) == (rest, greedy)
    fed = await post(
        server, "/v1/completions", prompt=[*context, *rest], max_tokens=0, prompt_logprobs=1
    )
    entries = fed["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    values = [
        entry[str(id)]["logprob"] for id, entry in zip(rest, entries[len(context) :], strict=True)
    ]
    assert sum(values) == pytest.approx(expected, rel=1e-5)


async def test_text_and_its_ids_are_one_prompt(server: Served) -> None:
    ids = await ids_of(server, TEXT)
    body = {"max_tokens": 0, "logprobs": 0, "echo": True}
    text = (await post(server, "/v1/completions", prompt=TEXT, **body))["choices"][0]
    same = (await post(server, "/v1/completions", prompt=ids, **body))["choices"][0]
    assert text["text"] == same["text"] == TEXT
    assert text["logprobs"]["token_logprobs"] == same["logprobs"]["token_logprobs"][1:]
    assert text["logprobs"]["tokens"] == same["logprobs"]["tokens"][1:]
    assert text["logprobs"]["text_offset"] == same["logprobs"]["text_offset"][1:]
    assert (await post(server, "/detokenize", tokens=ids[1:]))["prompt"] == TEXT


async def test_vector_is_of_the_input_alone(server: Served) -> None:
    many = await post(server, "/v1/embeddings", input=[TEXT, "another", TEXT])
    first, other, again = (data["embedding"] for data in many["data"])
    alone = (await post(server, "/v1/embeddings", input=TEXT))["data"][0]["embedding"]
    assert first == again == alone
    assert math.hypot(*first) == pytest.approx(1.0)
    assert len(first) == len(other)
    assert first != other


async def test_bias_bans_and_forces_tokens(server: Served) -> None:
    forced = await post(
        server, "/v1/completions", prompt=TEXT, max_tokens=4, logit_bias={"65": 100}, logprobs=0
    )
    assert len(set(forced["choices"][0]["logprobs"]["tokens"])) == 1
    free = await post(
        server, "/v1/completions", prompt=TEXT, max_tokens=4, temperature=0, logprobs=0
    )
    first = free["choices"][0]["logprobs"]["tokens"][0]
    context = await ids_of(server, TEXT)
    scores = await post(server, "/v1/score", prompt=context, continuations=[[5]], top=1)
    (id, _) = scores["data"][0]["top_logprobs"][0][0]
    banned = await post(
        server,
        "/v1/completions",
        prompt=TEXT,
        max_tokens=4,
        temperature=0,
        logit_bias={str(id): -100},
        logprobs=0,
    )
    assert banned["choices"][0]["logprobs"]["tokens"][0] != first
