"""Every sampling parameter reaches the engine by every route that generates."""

from __future__ import annotations

from typing import Any

import pytest

from server.api.schemas.requests import Sampling
from server.engine.types import SamplingParams
from tests.server.harness import Recorder, running

pytestmark = pytest.mark.process

FIELDS: dict[str, Any] = {
    "max_tokens": 3,
    "temperature": 0.5,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "typical_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "seed": 7,
    "stop": ["\n\n\n", "END"],
    "stop_token_ids": [3, 4],
    "ignore_eos": True,
    "logit_bias": {"5": -100, "6": 2.5},
}
EXPECTED = SamplingParams(
    max_tokens=3,
    temperature=0.5,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    typical_p=0.95,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    seed=7,
    stop=("\n\n\n", "END"),
    stop_token_ids=(3, 4),
    ignore_eos=True,
    logit_bias=((5, -100), (6, 2.5)),
)
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "/v1/completions": ({"prompt": "hi"}, {}),
    "/v1/chat/completions": ({"messages": MESSAGES}, {}),
    "/v1/responses": ({"input": "hi"}, {"max_tokens": "max_output_tokens"}),
}


@pytest.mark.parametrize("path", ROUTES)
async def test_what_is_given_arrives(path: str) -> None:
    body, names = ROUTES[path]
    engine = Recorder()
    async with running(engine) as server:
        given = {names.get(name, name): value for name, value in FIELDS.items()}
        response = await server.http.post(path, json={**body, **given})
        assert response.status_code == 200, response.text
    assert engine.sampling == [EXPECTED]


def test_every_field_is_tried() -> None:
    """But for the log-probabilities and formats, which each route shows in its own way."""
    assert FIELDS.keys() == Sampling.model_fields.keys() - {"top_logprobs", "response_format"}
