"""The mean of the hidden states, with the length 1, for each input."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import numpy as np
import pytest

from tests.fakes import embedding_of
from tests.server.api.talk import settled
from tests.server.harness import Running


async def embed(server: Running, **body: Any) -> dict[str, Any]:
    response = await server.http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def mean_of(text: bytes) -> list[float]:
    mean = np.mean([embedding_of(token) for token in text], axis=0)
    unit: list[float] = (mean / np.linalg.norm(mean)).tolist()
    return unit


async def test_vector_is_the_mean_with_the_length_one(server: Running) -> None:
    answer = await embed(server, input="hello", model="fake", user="me")
    (data,) = answer["data"]
    assert data["embedding"] == pytest.approx(mean_of(b"hello"), rel=1e-6)
    assert math.hypot(*data["embedding"]) == pytest.approx(1.0)
    assert (answer["object"], answer["model"]) == ("list", "fake")
    assert (data["object"], data["index"]) == ("embedding", 0)
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert (await settled(server)).held_slots == 0


@pytest.mark.parametrize("input", [["hi", "you"], [[104, 105], [121, 111, 117]]])
async def test_inputs_keep_their_order(server: Running, input: Any) -> None:
    answer = await embed(server, input=input)
    assert [data["index"] for data in answer["data"]] == [0, 1]
    for data, text in zip(answer["data"], (b"hi", b"you"), strict=True):
        assert data["embedding"] == pytest.approx(mean_of(text), rel=1e-6)
    assert answer["usage"]["prompt_tokens"] == 5


async def test_base64_has_the_same_numbers_in_32_bits(server: Running) -> None:
    plain = (await embed(server, input="hello", encoding_format="float"))["data"][0]["embedding"]
    text = (await embed(server, input="hello", encoding_format="base64"))["data"][0]["embedding"]
    data = base64.b64decode(text)
    assert list(struct.unpack(f"<{len(plain)}f", data)) == pytest.approx(plain, rel=1e-6)


async def test_2048_inputs_are_embedded_one_after_another(server: Running) -> None:
    answer = await embed(server, input=[[n % 100] for n in range(2048)])
    assert len(answer["data"]) == 2048
    assert answer["data"][105]["embedding"] == answer["data"][5]["embedding"]


async def test_state_that_is_not_finite_is_an_error(server: Running) -> None:
    response = await server.http.post("/v1/embeddings", json={"input": ["hi", "<fail>"]})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert (await settled(server)).held_slots == 0
