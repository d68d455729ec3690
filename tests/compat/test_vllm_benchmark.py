"""What vLLM's serving benchmark sends, and how it reads the stream.

Its client takes a chunk for a token where ``choices`` is not empty, and the chunk
without choices for the usage. Fields: ``model``, ``prompt`` (text or ids) or
``messages``, ``repetition_penalty``, ``max_tokens`` or ``max_completion_tokens``,
``logprobs`` (null too), ``stream``, ``stream_options.include_usage``,
``ignore_eos``, and the sampling that the command line names.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat.replayed import Json, chunks, post

NUM_TOKENS = 12
STREAM: Json = {"stream": True, "stream_options": {"include_usage": True}}
SAMPLING: Json = {
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.02,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
}


def completion(prompt: Any, **more: Any) -> Json:
    return {
        "model": "everstream-stories",
        "prompt": prompt,
        "repetition_penalty": 1.0,
        "max_tokens": NUM_TOKENS,
        "logprobs": None,
        **STREAM,
        "ignore_eos": True,
        **more,
    }


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": 1}, SAMPLING, {"ignore_eos": False}], ids=",".join
)
@pytest.mark.parametrize("prompt", ["Once upon a time", [0, 400, 401, 402]], ids=["text", "ids"])
def test_completions_stream_a_chunk_for_each_token(
    environment: dict[str, str], prompt: Any, more: Json
) -> None:
    url = f"{environment['EVERSTREAM_URL']}/v1/completions"
    answer = post(url, completion(prompt, **more), {"x-request-id": "benchmark-0"})
    *rest, last = chunks(answer)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == NUM_TOKENS
    assert last["usage"]["prompt_tokens"] >= 4
    assert all(chunk["usage"] is None for chunk in rest)
    *tokens, end = (chunk["choices"][0] for chunk in rest)
    assert len(tokens) == NUM_TOKENS
    assert end["finish_reason"] == "length"


def test_chat_streams_a_chunk_for_each_token(environment: dict[str, str]) -> None:
    body = {
        "model": "everstream-stories",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]}],
        "max_completion_tokens": NUM_TOKENS,
        **STREAM,
        "ignore_eos": True,
    }
    answer = post(f"{environment['EVERSTREAM_URL']}/v1/chat/completions", body)
    *rest, last = chunks(answer)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == NUM_TOKENS
    first, *tokens, end = (chunk["choices"][0] for chunk in rest)
    assert first["delta"]["role"] == "assistant"
    assert len(tokens) == NUM_TOKENS
    assert end["finish_reason"] == "length"
