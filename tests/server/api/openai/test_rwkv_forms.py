"""The chat of RWKV-7 over HTTP, with the templates of its published files and with ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from model.chat import ChatTemplate
from model.families.rwkv7.chat import NAME, world_chat
from model.tokenization import world
from model.tokenizer import Tokenizer
from server.constraints.compiler import FormatCompiler
from tests.fakes import ByteTokenizer
from tests.published_layouts import LAYOUTS, Layout
from tests.rwkv7 import SHAPES, published
from tests.server.api.openai.rwkv_templates import PUBLISHED
from tests.server.api.openai.test_chat_thinking import HI, answer, ask
from tests.server.api.openai.test_chat_tools import NAMED, TOOLS, calls_of, check, streamed
from tests.server.api.openai.thinking import thinking_server
from tests.server.harness import Running
from tests.server.served import Served, served

pytestmark = pytest.mark.process

#: What each template's prompt of a question ends with, with thinking and without.
ENDS = {
    "ours": ("Assistant: <think", "Assistant: <think>\n</think"),
    "official": ("Assistant: <think", "Assistant: <think></think>\n"),
    "switched": ("Bot✿<think", "Bot✿<think></think"),
    "converted": ("Assistant: <think>", "Assistant: <think>\n</think>"),
}


class WorldNames:
    """What `world_chat` asks of a tokenizer with the World vocabulary."""

    file_name = world.FILE
    special_ids = {"<|endoftext|>": 0}  # noqa: RUF012 - never written to


def chat_of(name: str) -> ChatTemplate:
    found = ChatTemplate(PUBLISHED.get(name, NAME))
    chat = world_chat(cast(Tokenizer, WorldNames()), found)
    assert chat is not None
    return chat


async def prompt_of(server: Running, **body: Any) -> str:
    """What the model reads of a question."""
    told = await server.http.post("/tokenize", json={"messages": HI, **body})
    assert told.status_code == 200, told.text
    text = await server.http.post("/detokenize", json={"tokens": told.json()["tokens"]})
    return str(text.json()["prompt"])


@pytest.mark.parametrize("name", ENDS)
async def test_thinking_is_off_unless_it_is_asked_for(name: str) -> None:
    on, off = ENDS[name]
    async with thinking_server(chat_template=chat_of(name)) as server:
        for given, end in (
            ({}, off),
            ({"enable_thinking": True}, on),
            ({"enable_thinking": False}, off),
            ({"thinking": True}, on),
            ({"rwkv_generation_prompt": "open_think"}, on),
            ({"rwkv_generation_prompt": "fake_think"}, off),
        ):
            prompt = await prompt_of(server, chat_template_kwargs=given)
            assert prompt.endswith(end), (given, prompt)
        num_off = (await answer(server, max_tokens=1))["usage"]["prompt_tokens"]
        for effort, more in (("none", 0), ("medium", len(on.encode()) - len(off.encode()))):
            found = await answer(server, reasoning_effort=effort, max_tokens=1)
            words = len(" (think)") if name == "ours" and effort == "medium" else 0
            assert found["usage"]["prompt_tokens"] == num_off + more + words
        refused = await ask(
            server, chat_template_kwargs={"thinking": True, "enable_thinking": False}
        )
        assert "contradicts" in refused.json()["error"]["message"]
    async with thinking_server(chat_template=chat_of(name), reasoning="on") as server:
        assert (await prompt_of(server)).endswith(on)


async def test_server_can_leave_thinking_to_the_template() -> None:
    for name, end in (("ours", "\n\nAssistant:"), ("converted", " <think>")):
        async with thinking_server(chat_template=chat_of(name), reasoning="template") as server:
            assert (await prompt_of(server)).endswith(end)


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("thinks", [True, False])
async def test_answer_is_whole_and_apart_from_the_thinking(name: str, thinks: bool) -> None:
    kwargs = {"enable_thinking": thinks}
    async with thinking_server(chat_template=chat_of(name)) as server:
        prompt = await prompt_of(server, chat_template_kwargs=kwargs)
    lead = "" if prompt.rstrip().endswith(">") else ">"
    thought = "\nIt is a list.\n</think>" if thinks else ""
    whole = "Here:\n\n- one\n\n```\na\n\nb\n```"
    end = "✿User" if name == "switched" else "\n\nUser: so"
    after = "x" * (len(prompt.removeprefix("<|endoftext|>").encode()) - 1)
    if prompt.startswith("<|endoftext|>"):
        after += "x"
    async with thinking_server(
        lead + thought + "\n" + whole + end, after, chat_template=chat_of(name)
    ) as server:
        (choice,) = (await answer(server, chat_template_kwargs=kwargs))["choices"]
    assert choice["message"]["content"] == whole
    assert choice["message"].get("reasoning_content") == ("It is a list." if thinks else None)
    assert choice["finish_reason"] == "stop"


CALLED = '```json\n{"name": "wait", "arguments": {}}\n```'


def compiler() -> FormatCompiler:
    """One for each server, which closes it."""
    return FormatCompiler(cast(Tokenizer, ByteTokenizer()))


@pytest.mark.parametrize("name", ENDS)
async def test_calls_are_fenced_whether_forced_or_not(name: str) -> None:
    template, asked = chat_of(name), {"messages": HI, "tools": TOOLS}
    async with thinking_server(chat_template=template, constraints=compiler()) as server:
        prompt = await prompt_of(server, tools=TOOLS)
        assert "Tools:\n[{" in prompt and "weather" in prompt
        for seed in range(3):
            (calls,) = calls_of(await ask(server, **asked, tool_choice=NAMED, seed=seed))
            check(calls)
    lead = "" if prompt.rstrip().endswith(">") else ">"
    gap = "" if prompt.endswith("\n") else "\n"
    after = "x" * (len((prompt + lead + gap).replace("<|endoftext|>", "x").encode()) - 1)
    said = CALLED, after
    async with thinking_server(*said, chat_template=template, constraints=compiler()) as server:
        whole = await ask(server, **asked)
        assert calls_of(whole) == [[("wait", {})]]
        assert streamed(await ask(server, **asked, stream=True)) == [("wait", {})]
        message = whole.json()["choices"][0]["message"]
        gave = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Done."}
        again = {"messages": [*HI, message, gave], "tools": TOOLS}
        sent = await prompt_of(server, **again)
        result = f"{CALLED}\n\nUser: Function output:\nDone.\n\nAssistant:"
        assert result in sent
        words = await answer(server, **again, max_tokens=3)
    assert words["choices"][0]["finish_reason"] == "length"


async def test_history_of_a_call_is_what_the_model_read_and_wrote() -> None:
    settings = {"chat_template": chat_of("ours"), "reasoning": "template"}
    async with thinking_server(constraints=compiler(), **settings) as server:
        before = await prompt_of(server, tools=TOOLS)
        found = (await ask(server, tools=TOOLS, tool_choice=NAMED, seed=1)).json()
        message = found["choices"][0]["message"]
        (call,) = message["tool_calls"]
        after = await prompt_of(server, messages=[*HI, message, *HI], tools=TOOLS)
    arguments = json.dumps(json.loads(call["function"]["arguments"]))
    written = f'```json\n{{"name": "weather", "arguments": {arguments}}}\n```'
    assert after == f"{before} {written}\n\nUser: hi\n\nAssistant:"


#: One for each way to say what a text begins with: a template's own name of it, none, a GGUF's, a
#: post-processor, an id of another tokenizer.
NAMES = ("fla", "native", "GGUF", "transformers-rwkv", "hf-adapter", "RWKV project")
TEXT = "a<|rwkv_tokenizer_end_of_text|>b<|endoftext|>c"


async def ids_of(server: Served, **body: Any) -> list[int]:
    response = await server.http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["tokens"]
    return ids


@pytest.mark.parametrize(
    "layout", [each for each in LAYOUTS if each.name in NAMES], ids=lambda layout: layout.name
)
async def test_chat_begins_with_id_0_and_a_user_cannot_write_it(
    layout: Layout, tmp_path: Path
) -> None:
    path = layout.write(tmp_path / "model", SHAPES["square"], published(SHAPES["square"]))
    async with served(f"tiny={path}") as server:
        ids = await ids_of(server, messages=[{"role": "user", "content": TEXT}])
        assert ids[0] == 0
        assert ids.count(0) == 1
        told = await server.http.post("/detokenize", json={"tokens": ids[1:]})
        assert TEXT in told.json()["prompt"]
        assert (await ids_of(server, prompt="abc"))[0] == 0
        asked = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        made = (await server.http.post("/v1/completions", json=asked)).json()
        assert made["usage"]["completion_tokens"] == 4
