"""Text to token ids and back, as evaluation harnesses ask for it, and ids shown with answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.fakes import EOS
from tests.server.api.openai.responding import PROMPT, asked, events_of, get, text_of
from tests.server.api.talk import story, values_of
from tests.server.harness import Running
from tests.server.served import served
from tests.tiny import write_model

MESSAGE = {"role": "user", "content": "hi"}


async def post(server: Running, path: str, **body: object) -> httpx.Response:
    return await server.http.post(path, json=body)


async def test_text_becomes_the_ids_that_a_completion_is_fed(server: Running) -> None:
    answer = (await post(server, "/tokenize", prompt="hé")).json()
    assert answer == {
        "count": 4,
        "max_model_len": 1 << 20,
        "tokens": [EOS, 0x68, 0xC3, 0xA9],
        "token_strs": None,
    }
    answer = await post(
        server, "/tokenize", prompt="hé", add_special_tokens=False, return_token_strs=True
    )
    assert answer.json()["tokens"] == [0x68, 0xC3, 0xA9]
    assert answer.json()["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]


async def test_harness_finds_the_id_of_the_end_by_its_name(server: Running) -> None:
    info = (await server.http.get("/tokenizer_info")).json()
    assert info["eos_token"] == info["bos_token"] == "<|endoftext|>"
    assert (info["bos_token_id"], info["eos_token_id"], info["vocab_size"]) == (EOS, EOS, 257)
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert (await post(server, "/tokenize", **body)).json()["tokens"] == [EOS]
    plain = await post(server, "/tokenize", **body, allow_special=False)
    assert plain.json()["tokens"] == list(b"<|endoftext|>")


async def test_ids_become_their_text_again(server: Running) -> None:
    for text in ("", "hé", "a<|endoftext|>b"):
        body = {"prompt": text, "add_special_tokens": False}
        tokens = (await post(server, "/tokenize", **body)).json()["tokens"]
        answer = await post(server, "/detokenize", tokens=tokens, model="fake")
        assert answer.json() == {"prompt": text, "content": text}
    assert (await post(server, "/detokenize", tokens=[0xC3])).json()["prompt"] == "\ufffd"


@pytest.mark.process
async def test_messages_become_the_ids_that_a_chat_is_fed(server: Running) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = (await post(server, "/tokenize", messages=messages)).json()
    chat = await post(server, "/v1/chat/completions", messages=messages, max_tokens=1)
    assert answer["count"] == chat.json()["usage"]["prompt_tokens"]
    assert bytes(answer["tokens"]) == b"hi\n\n"
    for fields in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        open_end = await post(server, "/tokenize", messages=messages, **fields)
        assert bytes(open_end.json()["tokens"]) == b"hi"
    kwargs = {"name": "Ada"}
    same = await post(server, "/tokenize", messages=messages, chat_template_kwargs=kwargs)
    assert same.json() == answer


async def test_long_text_is_tokenized_elsewhere_and_all_the_same(server: Running) -> None:
    answer = await post(server, "/tokenize", prompt="ab" * 50_000, add_special_tokens=False)
    assert answer.json()["count"] == 100_000


async def test_unknown_model_is_404(server: Running) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
        assert (await post(server, path, **body, model="other")).status_code == 404


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


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
async def test_key_and_ids_do_not_go_together(server: Running) -> None:
    body = {**CHAT, **WANTED, "keep": True, "idempotency_key": "k"}
    answer = await server.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "idempotency_key")


@pytest.mark.process
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
