"""``return_token_ids``: what was read and written, as vLLM shows it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api.openai.responding import PROMPT, asked, events_of, get, text_of
from tests.server.api.talk import story, values_of
from tests.server.harness import Running
from tests.server.served import served
from tests.tiny import write_model

pytestmark = pytest.mark.process

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
WANTED = {"return_token_ids": True, "max_tokens": 6, "seed": 0}


async def test_completion_has_the_ids_of_the_prompt_and_of_each_choice(server: Running) -> None:
    body = {"prompt": ["hi", "ho!"], "n": 2, **WANTED}
    choices = (await server.generate(**body)).json()["choices"]
    for index, choice in enumerate(choices):
        assert bytes(choice["prompt_token_ids"]) == (b"hi" if index < 2 else b"ho!")
        assert bytes(choice["token_ids"]).decode() == choice["text"]
    streamed = values_of(await server.generate(**body, stream=True))
    for index, choice in enumerate(choices):
        parts = [c["choices"][0] for c in streamed if c["choices"][0]["index"] == index]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [id for part in parts for id in part["token_ids"]] == choice["token_ids"]
        assert not any("prompt_token_ids" in part for part in parts[1:])


async def test_chat_has_the_ids_of_the_prompt_and_of_each_choice(server: Running) -> None:
    body: dict[str, Any] = {**CHAT, **WANTED, "n": 2}
    answer = (await server.http.post("/v1/chat/completions", json=body)).json()
    assert bytes(answer["prompt_token_ids"]) == b"hi\n\n"
    for choice in answer["choices"]:
        text = choice["message"]["content"]
        assert bytes(choice["token_ids"]).decode() == text == story(4, 6, choice["index"])
    streamed = values_of(
        await server.http.post("/v1/chat/completions", json={**body, "stream": True})
    )
    for choice in answer["choices"]:
        mine = [c for c in streamed if c["choices"][0]["index"] == choice["index"]]
        assert mine[0]["prompt_token_ids"] == answer["prompt_token_ids"]
        ids = [id for c in mine for id in c["choices"][0].get("token_ids", [])]
        assert ids == choice["token_ids"]


async def test_nothing_is_shown_where_it_is_not_asked_for(server: Running) -> None:
    answer = await server.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1})
    assert "token_ids" not in answer.text
    assert "token_ids" not in (await server.generate(prompt="hi", max_tokens=1)).text


async def test_ids_can_be_sent_back_and_give_the_same(tmp_path: Any) -> None:
    """With the start token that a text gets, and the token that ended it."""
    async with served(f"m={write_model(tmp_path / 'm')}", store="memory") as server:
        first = await server.complete("Once upon", return_token_ids=True)
        (choice,) = first["choices"]
        assert len(choice["prompt_token_ids"]) == first["usage"]["prompt_tokens"]
        assert len(choice["token_ids"]) == first["usage"]["completion_tokens"]
        again = await server.complete(choice["prompt_token_ids"], return_token_ids=True)
        assert again["choices"] == first["choices"]


async def test_key_and_ids_do_not_go_together(server: Running) -> None:
    body = {**CHAT, **WANTED, "keep": True, "idempotency_key": "k"}
    answer = await server.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "idempotency_key")


async def test_response_has_the_ids_that_it_read_and_wrote_whenever_it_is_read(
    server: Running,
) -> None:
    response = await asked(server, return_token_ids=True)
    assert bytes(response["prompt_token_ids"]) == PROMPT.encode()
    assert bytes(response["token_ids"]).decode() == text_of(response)
    assert (await get(server, response["id"])).json() == response
    events = events_of(await get(server, response["id"], stream="true"))
    assert events[-1]["response"] == response
    more = {"input": "more", "previous_response_id": response["id"], "return_token_ids": True}
    following = await asked(server, **more)
    assert bytes(following["prompt_token_ids"]) == b"\n\nmore\n\n"
    assert "token_ids" not in await asked(server)
