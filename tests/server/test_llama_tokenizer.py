"""A checkpoint of flash-linear-attention with a tokenizer of Llama's kind, served as published.

What is special about it: a text begins with a space that no one wrote, one character may be
several byte tokens, and two tokens end a text, neither called ``<|endoftext|>``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from benchmarks import sse
from model.checkpoint import load_checkpoint
from model.tokenization.library import LibraryCodec
from model.tokenizer import Tokenizer
from server.engine.engine import Engine, EngineConfig
from server.models.backend import open_backend
from tests.model.foreign.test_flash_linear_attention import Theirs
from tests.model.tokenization.files import LLAMA_ENDS, llama
from tests.server.served import Served, served
from tests.tiny import IDS, request, solo, text_of, tokens_of

pytestmark = pytest.mark.process

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "wild": {"type": "boolean"}},
    "required": ["name", "wild"],
    "additionalProperties": False,
}
BOS, EOS, OTHER_END = 1, 2, 0


def tokenizer() -> Tokenizer:
    return Tokenizer(LibraryCodec(llama("legacy", num_learnt=51), LLAMA_ENDS))


def write_checkpoint(folder: Path) -> Path:
    Theirs("gla", {"bos_token_id": BOS, "eos_token_id": [EOS, OTHER_END]}).save(folder, tokenizer())
    return folder


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(f"tiny={write_checkpoint(tmp_path / 'tiny')}") as found:
        yield found


async def post(server: Served, path: str, **body: Any) -> dict[str, Any]:
    response = await server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_text_of_a_completion_follows_the_prompt(server: Served) -> None:
    whole = await server.text("Once upon", max_tokens=40)
    assert await server.text("Once upon", max_tokens=40, echo=True) == "Once upon" + whole
    body = {"prompt": "Once upon", "max_tokens": 40, "seed": 3, "ignore_eos": True, "stream": True}
    streamed = ""
    async with server.http.stream("POST", "/v1/completions", json=body) as response:
        for chunk in sse.values_of(await response.aread(), done=True):
            streamed += chunk["choices"][0]["text"]
    assert streamed == whole


async def test_stop_string_ends_a_completion(server: Served) -> None:
    whole = await server.text(max_tokens=40)
    stop = whole[12:15]
    assert await server.text(max_tokens=40, stop=stop) == whole[: whole.index(stop)]


async def test_answer_is_json_of_the_schema(server: Served) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for prompt in ("Once upon", [BOS]):  # or the start token alone
        for seed in range(3):
            answer = await server.text(
                prompt, response_format=format, max_tokens=60, seed=seed, ignore_eos=False
            )
            assert set(json.loads(answer)) == {"name", "wild"}


async def test_grammar_counts_the_space_of_a_text_s_first_token(server: Served) -> None:
    format = {"type": "regex", "regex": " [a-z]{3}"}
    text = await server.text([BOS], response_format=format, ignore_eos=False)
    assert (text[0], len(text)) == (" ", 4)


async def test_each_end_of_text_ends_it(server: Served) -> None:
    for id in (EOS, OTHER_END):
        bias = {str(id): 100.0}
        answer = await server.complete(logit_bias=bias, temperature=0.0, ignore_eos=False)
        assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["text"]) == ("stop", "")


async def test_tokens_of_a_text_and_back(server: Served) -> None:
    for text in ("Once upon", " a  b ", "漢 🦊\n", ""):
        found = await post(server, "/tokenize", prompt=text, add_special_tokens=False)
        assert found["tokens"] == tokenizer().encode(text)
        assert (await post(server, "/detokenize", tokens=found["tokens"]))["prompt"] == text
    found = await post(server, "/tokenize", prompt="Once</s>Once", return_token_strs=True)
    assert found["token_strs"][0] == "<s>"
    assert found["token_strs"].count("</s>") == 1
    assert found["token_strs"][1].startswith(" ")
    text = (await post(server, "/detokenize", tokens=found["tokens"]))["prompt"]
    assert text == "<s> Once</s> Once"  # as the library shows it
    info = (await server.http.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")


async def test_session_continues_without_an_inserted_space(server: Served) -> None:
    session = (await post(server, "/v1/sessions"))["session"]
    path = f"/v1/sessions/{session}"
    await post(server, f"{path}/append", text="Once")
    await post(server, f"{path}/append", text=" upon")
    text = await server.text("a time", session=session)
    parts = (await server.http.get(f"{path}/text")).json()["parts"]
    assert [part["text"] for part in parts] == ["Once", " upon", "a time", text]
    assert await server.text("Once upona time") == text  # its state is that of the whole text
    pages = [
        (await server.http.get(f"{path}/text", params={"start": at, "max_tokens": 1})).json()
        for at in range(3)
    ]
    head = "".join(part["text"] for page in pages for part in page["parts"])
    assert "Once upona time".startswith(head)


async def test_continuations_are_scored_as_they_stand(server: Served) -> None:
    scores = await post(server, "/v1/score", prompt="Once", continuations=["upon", " upon"])
    wanted = [tokenizer().encode_continuation(text) for text in ("upon", " upon")]
    assert [one["tokens"] for one in scores["data"]] == wanted
    alone = await post(server, "/v1/score", prompt="", continuations=["upon"])
    assert alone["data"][0]["tokens"] == tokenizer().encode("upon")


async def test_echo_with_logprobs_counts_the_characters_that_are_shown(server: Served) -> None:
    answer = await server.complete("Once upon", echo=True, logprobs=0, max_tokens=5)
    (choice,) = answer["choices"]
    offsets = choice["logprobs"]["text_offset"]
    num_prompt = len(tokenizer().encode("Once upon"))
    assert (offsets[0], offsets[num_prompt]) == (0, len("Once upon"))


async def test_chat_begins_with_the_start_token(server: Served) -> None:
    messages = [{"role": "user", "content": "Once </s> upon"}]
    found = await post(server, "/tokenize", messages=messages)
    assert found["tokens"][0] == BOS
    assert not {EOS, OTHER_END} & set(found["tokens"])


def make_engine(folder: Path) -> Engine:
    backend = open_backend(load_checkpoint(folder), "torch", "float32")
    return backend.engine(2, EngineConfig(new_id=lambda: f"s{next(IDS)}"))


@pytest.mark.parametrize("prompt", ["", "Once upon", "漢"])
def test_stream_is_the_rest_of_the_whole_decoding(tmp_path: Path, prompt: str) -> None:
    engine = make_engine(write_checkpoint(tmp_path / "tiny"))
    ids = tokenizer().encode(prompt)
    for seed in range(5):
        events = solo(engine, request(tokens=ids, seed=seed, max_tokens=30))
        whole = tokenizer().decode([BOS, *ids, *tokens_of(events)])
        assert whole == prompt + text_of(events)


def test_saved_session_continues_with_the_same_text(tmp_path: Path) -> None:
    """Also where only the start token came before: the first space is still to be dropped."""
    engine = make_engine(write_checkpoint(tmp_path / "tiny"))
    session = engine.kept.create("me", 0.0).session
    solo(engine, request(tokens=[BOS], session=session, generate=False, start=False))
    copy = engine.kept.adopt(engine.kept.value(session, "me"), "me", 0.0).session
    space = tokenizer().encode_continuation(" ")
    forced: dict[str, Any] = {"logit_bias": ((space[0], 100.0),), "temperature": 0.0}
    for each in (session, copy):
        events = solo(engine, request(tokens=[], session=each, max_tokens=2, **forced))
        assert tokens_of(events) == space * 2
        assert text_of(events) == " "
