"""Calls of tools and their results in Anthropic's blocks, by a fake engine under a grammar."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import jsonschema
import pytest
import pytest_asyncio

from model.chat import ChatTemplate
from model.tokenizer import Tokenizer
from server.constraints.compiler import FormatCompiler
from tests.fakes import ByteTokenizer, FakeEngine
from tests.server.api.anthropic.talking import HI, ask, collected, events_of, message
from tests.server.harness import Running, running

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "pattern": "^[A-Za-z]{1,8}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "description": "Tells it.", "input_schema": WEATHER},
    {"type": "custom", "name": "wait", "input_schema": {"type": "object", "maxProperties": 0}},
]
SCHEMAS = {tool["name"]: tool["input_schema"] for tool in TOOLS}
#: Shows all that a template can see of messages and tools.
SHOWN = ChatTemplate(
    "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ tools | tojson }}"
    "{% if add_generation_prompt %}:{% endif %}"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Running]:
    """One for all tests: a compiler of formats and a renderer of templates are processes."""
    constraints = FormatCompiler(cast(Tokenizer, ByteTokenizer()))
    engine = FakeEngine(matchers=constraints.matcher)
    async with running(engine, constraints=constraints) as started:
        yield started


def check(found: dict[str, Any], *names: str) -> None:
    """That an answer is calls of these tools, with arguments as their schemas say."""
    assert found["stop_reason"] == "tool_use", found
    assert tuple(block["name"] for block in found["content"]) == names
    assert len({block["id"] for block in found["content"]}) == len(names)
    for block in found["content"]:
        assert block["type"] == "tool_use"
        assert block["id"].startswith("toolu_")
        jsonschema.validate(block["input"], SCHEMAS[block["name"]])


async def test_named_tool_is_called_whole_and_in_a_stream(server: Running) -> None:
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}
    whole = await message(server, **body, max_tokens=500)
    check(whole, "weather")
    streamed = collected(events_of(await ask(server, **body, max_tokens=500, stream=True)))
    check(streamed, "weather")
    assert streamed["content"][0]["input"] == whole["content"][0]["input"]


async def test_any_tool_must_be_called(server: Running) -> None:
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "any"}}
    for seed in range(3):
        found = await message(server, **body, seed=seed, max_tokens=500)
        assert len(found["content"]) == 1
        check(found, found["content"][0]["name"])


async def test_several_calls_are_several_blocks(server: Running) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": False}
    found = [
        await message(server, tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=2000)
        for seed in range(12)
    ]
    for each in found:
        check(each, *(block["name"] for block in each["content"]))
    assert max(len(each["content"]) for each in found) > 1


async def test_call_that_was_cut_has_what_there_is_of_it(server: Running) -> None:
    choice = {"type": "tool", "name": "weather"}
    found = await message(server, tools=TOOLS, tool_choice=choice, max_tokens=45)
    assert found["stop_reason"] == "max_tokens"
    (block,) = found["content"]
    assert block["name"] == "weather"
    assert isinstance(block["input"], dict)


@pytest.mark.parametrize("place", ["output_config", "output_format"])
async def test_answer_follows_a_schema(server: Running, place: str) -> None:
    format = {"type": "json_schema", "schema": WEATHER}
    asked = {"output_config": {"format": format}, "output_format": format}[place]
    found = await message(server, **{place: asked}, max_tokens=500)
    (block,) = found["content"]
    jsonschema.validate(json.loads(block["text"]), WEATHER)
    assert found["stop_reason"] == "end_turn"


def deep(num_levels: int) -> dict[str, Any]:
    """A turn with a call whose argument is nested."""
    value: Any = 0
    for _ in range(num_levels):
        value = [value]
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": value}}
    return {"role": "assistant", "content": [call]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": TOOLS[:1] * 2}, "tools"),
        ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tools": [{"type": "Bad type"}]}, "tools[0].type"),
        ({"messages": [*HI, deep(300)]}, "messages[1].content[0].input"),
        ({"messages": [*HI, deep(70)]}, "messages[1].content[0].input"),
    ],
)
async def test_bad_tool_is_named(server: Running, body: dict[str, Any], param: str) -> None:
    answer = await ask(server, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


ROME = {"place": "Rome"}


async def test_template_gets_calls_results_and_thoughts() -> None:
    turns: list[dict[str, Any]] = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "y"},
                {"type": "text", "text": "I look."},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "weather",
                    "input": {"place": "Rome"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Rain."},
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
        {"role": "user", "content": "Well?"},
    ]
    call = {"name": "weather", "arguments": ROME}
    expected = [
        {"role": "system", "content": "Be\nnice."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "Rain.", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "And now?\nWell?"},
    ]
    async with running(chat_template=SHOWN) as server:
        system = [{"type": "text", "text": text} for text in ("Be", "nice.")]
        answer = await ask(server, messages=turns, system=system)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-everstream-ignored"] == "data, is_error"
        lines = "".join(json.dumps(each, separators=(", ", ": ")) + "\n" for each in expected)
        num_tokens = answer.json()["usage"]["input_tokens"]
    assert num_tokens == len(f"{lines}null:")
