"""Text to token ids and back, as evaluation harnesses ask for it."""

from __future__ import annotations

import httpx
import pytest

from tests.fakes import EOS
from tests.server.harness import Running

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
        assert answer.json() == {"prompt": text}
    assert (await post(server, "/detokenize", tokens=[0xC3])).json() == {"prompt": "\ufffd"}


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
