"""Completions, models and embeddings."""

from __future__ import annotations

import asyncio
import math

import pytest
from openai import BadRequestError
from served import ENDLESS, MODEL, PROMPT, async_client, client


def test_models_are_listed_and_found() -> None:
    with client() as openai:
        assert [model.id for model in openai.models.list()] == [MODEL]
        assert openai.models.retrieve(MODEL).object == "model"


def test_completion_has_text_and_usage() -> None:
    with client() as openai:
        answer = openai.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=12, seed=1, extra_body=ENDLESS
        )
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_seed_repeats_a_completion() -> None:
    with client() as openai:
        texts = {
            openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, seed=7)
            .choices[0]
            .text
            for _ in range(2)
        }
    assert len(texts) == 1


def test_stream_equals_the_whole_answer() -> None:
    with client() as openai:
        whole = openai.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=16, seed=3, extra_body=ENDLESS
        )
        chunks = list(
            openai.completions.create(
                model=MODEL,
                prompt=PROMPT,
                max_tokens=16,
                seed=3,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=ENDLESS,
            )
        )
    last = chunks.pop()
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 16
    assert all(chunk.usage is None for chunk in chunks)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_batch_of_prompts_with_n_is_numbered_prompt_by_prompt() -> None:
    with client() as openai:
        answer = openai.completions.create(
            model=MODEL, prompt=["The cat", "The dog"], n=2, max_tokens=4, echo=True
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:7] for choice in answer.choices] == ["The cat"] * 2 + ["The dog"] * 2


def test_logprobs_name_each_token() -> None:
    with client() as openai:
        answer = openai.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=5,
            temperature=0,
            logprobs=3,
            echo=True,
            extra_body=ENDLESS,
        )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
    assert "".join(found.tokens) == answer.choices[0].text
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs)
    for token, value, top in list(
        zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
    )[-5:]:
        assert top[token] == value == max(top.values())
        assert math.exp(value) <= 1


def test_token_ids_and_sampling_parameters_are_taken() -> None:
    with client() as openai:
        answer = openai.completions.create(
            model=MODEL,
            prompt=[[0, 300, 301]],
            max_tokens=6,
            temperature=0.7,
            top_p=0.9,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logit_bias={"0": -100},
            stop=["\n\n\n"],
            best_of=2,
            user="somebody",
            seed=5,
            extra_body={
                "top_k": 40,
                "min_p": 0.01,
                "typical_p": 0.9,
                "top_n_sigma": 3,
                "repetition_penalty": 1.1,
            },
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_left_stream_frees_the_server_for_the_next() -> None:
    with client() as openai:
        for _ in range(3):
            with openai.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=2000, stream=True, seed=1
            ) as stream:
                assert next(iter(stream)).choices
        assert openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2).choices


def test_async_client_streams_and_is_cancelled() -> None:
    async def run() -> None:
        async with async_client() as openai:
            stream = await openai.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=10_000, stream=True
            )
            first = asyncio.Event()

            async def read() -> None:
                async for chunk in stream:
                    assert chunk.choices
                    first.set()

            reader = asyncio.create_task(read())
            await first.wait()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await stream.close()
            again = await openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)
            assert again.choices[0].text

    asyncio.run(run())


@pytest.mark.parametrize("encoding", ["float", None])
def test_embeddings_are_vectors_of_length_one(encoding: str | None) -> None:
    """Without an encoding the package asks for base64 and decodes it itself."""
    with client() as openai:
        options = {} if encoding is None else {"encoding_format": encoding}
        answer = openai.embeddings.create(model=MODEL, input=["The cat", "A dog"], **options)
    assert [item.index for item in answer.data] == [0, 1]
    for item in answer.data:
        assert math.isclose(sum(x * x for x in item.embedding), 1, rel_tol=1e-5)
    assert answer.usage.total_tokens > 0


def test_unsupported_field_is_refused_by_its_name() -> None:
    with client() as openai, pytest.raises(BadRequestError) as caught:
        openai.completions.create(model=MODEL, prompt=PROMPT, suffix="the end")
    assert caught.value.param == "suffix"
    assert caught.value.type == "invalid_request_error"
