"""Without a bound of the client's an answer goes on until its end, or to a bound that is kept."""

from __future__ import annotations

import pytest

from model.chat_template import ChatTemplate
from server.engine.types import SamplingParams
from tests.server.api.openai.responding import ASKED
from tests.server.harness import Recorder, running

pytestmark = pytest.mark.process

OWN = ChatTemplate("{{ messages[0].content }}")
CHAT = {"messages": [{"role": "user", "content": "END"}]}


async def asked_for(path: str, body: object, template: ChatTemplate, limit: int) -> SamplingParams:
    engine = Recorder()
    async with running(engine, chat_template=template, max_tokens_limit=limit) as server:
        answer = await server.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
    (params,) = engine.sampling
    assert params is not None
    return params


@pytest.mark.parametrize(
    ("template", "n", "limit", "expected"),
    [
        (OWN, 1, 10**6, 4096),
        (OWN, 1, 1000, 1000),
        (OWN, 4, 10**6, 1024),
        (OWN, 16, 10**6, 256),
        (ChatTemplate(), 1, 10**6, 256),
    ],
)
async def test_chat_without_a_bound_has_room_for_its_end(
    template: ChatTemplate, n: int, limit: int, expected: int
) -> None:
    params = await asked_for("/v1/chat/completions", {**CHAT, "n": n}, template, limit)
    assert params.max_tokens == expected


@pytest.mark.parametrize(("template", "expected"), [(OWN, 4096), (ChatTemplate(), 256)])
async def test_response_without_a_bound_has_room_for_its_end(
    template: ChatTemplate, expected: int
) -> None:
    body = {**ASKED, "input": "END", "max_output_tokens": None}
    assert (await asked_for("/v1/responses", body, template, 10**6)).max_tokens == expected


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_bound_of_the_client_is_kept(name: str) -> None:
    params = await asked_for("/v1/chat/completions", {**CHAT, name: 7}, OWN, 10**6)
    assert params.max_tokens == 7
