"""What Open WebUI's backend sends to a server that speaks OpenAI's API, and what it reads.

It lists ``{base}/models`` with the key and wants ``data[].id``; each is shown under
``name`` or ``id``. A chat is ``model``, ``messages``, ``stream`` and, where the user has set
them, ``temperature``, ``top_p``, ``min_p``, ``top_k``, ``max_tokens`` (it renames
``max_completion_tokens``), ``frequency_penalty``, ``presence_penalty``, ``seed``, ``stop``,
``logit_bias``, ``response_format``, ``tools``, and ``stream_options.include_usage``. A stream
is passed on as it comes; an error's ``error.message`` is what its user sees.
"""

from __future__ import annotations

import httpx
import pytest

from model.architectures import config_from_dict
from model.files import read_json
from tests.chosen_model import bundled_model
from tests.compat.replayed import Json, chunks, post

#: Sent with each request where an administrator wants users' names forwarded.
USER = {
    "X-OpenWebUI-User-Name": "Ada%20L",
    "X-OpenWebUI-User-Id": "7",
    "X-OpenWebUI-User-Email": "ada@example.org",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "1f0c",
}
CHAT: Json = {
    "model": "everstream-stories",
    "messages": [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": "Tell me of the old mill."},
        {"role": "assistant", "content": "It was old."},
        {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
    ],
}
EOS = config_from_dict(read_json(bundled_model() / "config.json")).eos_token_id
#: As its users set them on the page; it turns its list of biases into this object.
SETTINGS: Json = {
    "temperature": 0.8,
    "top_p": 0.9,
    "min_p": 0.05,
    "top_k": 40,
    "max_tokens": 12,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "seed": 42,
    "stop": ["\n\n\n"],
    "logit_bias": {str(EOS): -100},
}


@pytest.fixture
def base(environment: dict[str, str]) -> str:
    return f"{environment['EVERSTREAM_URL']}/v1"


def test_models_are_listed_with_the_key(base: str) -> None:
    headers = {"Authorization": "Bearer usual", "Content-Type": "application/json", **USER}
    answer = httpx.get(f"{base}/models", headers=headers, timeout=60)
    assert answer.status_code == 200
    assert [model["id"] for model in answer.json()["data"]] == ["everstream-stories"]


def test_wrong_key_is_reported_by_the_connection_check(base: str) -> None:
    answer = httpx.get(f"{base}/models", headers={"Authorization": "Bearer wrong"}, timeout=60)
    assert answer.status_code == 401
    assert answer.json()["error"]["message"]


def test_chat_is_streamed_with_all_settings(base: str) -> None:
    body = CHAT | SETTINGS | {"stream": True, "stream_options": {"include_usage": True}}
    found = chunks(post(f"{base}/chat/completions", body, USER))
    text = "".join(
        choice["delta"].get("content") or "" for chunk in found for choice in chunk["choices"]
    )
    assert text
    assert found[-1]["usage"]["completion_tokens"] == 12


def test_title_of_a_chat_is_asked_for_without_a_stream(base: str) -> None:
    body = CHAT | {"stream": False, "max_tokens": 12}
    answer = post(f"{base}/chat/completions", body, USER)
    assert answer.json()["choices"][0]["message"]["content"]


def test_setting_that_the_server_lacks_has_a_message_for_the_user(base: str) -> None:
    answer = post(f"{base}/chat/completions", CHAT | {"reasoning_effort": "high"}, USER)
    assert answer.status_code == 400
    assert "reasoning_effort" in answer.json()["error"]["message"]


def test_documents_are_embedded(base: str) -> None:
    body = {"input": ["The cat", "The dog"], "model": "everstream-stories"}
    answer = post(f"{base}/embeddings", body)
    assert len({len(item["embedding"]) for item in answer.json()["data"]}) == 1
