"""Calls of functions, by a fake engine that draws whatever the grammar leaves it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import jsonschema
import pytest
import pytest_asyncio

from model.chat import ChatTemplate, literal
from model.tokenizer import Tokenizer
from server.constraints.compiler import FormatCompiler
from tests.fakes import ByteTokenizer, FakeEngine
from tests.server.api.openai.test_chat import HI, NUM_HI, ask
from tests.server.api.talk import story, values_of
from tests.server.harness import Running, running

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "pattern": "^[A-Za-z]{1,8}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["place", "days", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "wait", "description": "Waits."}},
]
SCHEMAS = {"weather": WEATHER, "wait": {"type": "object", "maxProperties": 0}}
NAMED = {"type": "function", "function": {"name": "weather"}}

Calls = list[tuple[str, Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Running]:
    """One for all tests: a compiler of formats and a renderer of templates are processes."""
    constraints = FormatCompiler(cast(Tokenizer, ByteTokenizer()))
    engine = FakeEngine(matchers=constraints.matcher)
    async with running(engine, constraints=constraints) as started:
        yield started


def calls_of(response: httpx.Response) -> list[Calls]:
    """The calls of each choice, whole."""
    assert response.status_code == 200, response.text
    found = []
    for choice in response.json()["choices"]:
        message = choice["message"]
        assert message["content"] is None
        assert choice["finish_reason"] == "tool_calls"
        calls = message["tool_calls"]
        assert all(call["type"] == "function" for call in calls)
        assert len({call["id"] for call in calls}) == len(calls)
        found.append([(c["function"]["name"], c["function"]["arguments"]) for c in calls])
    return [[(name, json.loads(text)) for name, text in calls] for calls in found]


def streamed(response: httpx.Response) -> Calls:
    """The calls of a stream, put together as OpenAI's clients do."""
    first, *others, last = values_of(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None, "refusal": None}
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    calls: list[dict[str, str]] = []
    assert all(chunk["choices"][0]["delta"] for chunk in others)
    for chunk in others:
        for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                assert part["type"] == "function"
                calls.append({"name": part["function"]["name"], "arguments": ""})
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def check(calls: Calls) -> None:
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])


async def test_named_function_is_called_once(server: Running) -> None:
    for seed in range(5):
        response = await ask(server, tools=TOOLS, tool_choice=NAMED, seed=seed)
        (calls,) = calls_of(response)
        assert [name for name, _ in calls] == ["weather"]
        check(calls)


async def test_required_calls_one_of_the_functions(server: Running) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 2000}
    for calls in calls_of(await ask(server, **options, n=4, seed=3)):
        assert len(calls) == 1
        check(calls)


async def test_parallel_calls_are_several(server: Running) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 2000}
    answers = calls_of(await ask(server, **options, n=4, seed=3, parallel_tool_calls=True))
    for calls in answers:
        check(calls)
    assert max(map(len, answers)) > 1


async def test_stream_has_the_name_first_and_then_the_arguments(server: Running) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 2000}
    options |= {"parallel_tool_calls": True, "seed": 3}
    whole = calls_of(await ask(server, **options))
    assert [streamed(await ask(server, **options, stream=True))] == whole


async def test_model_that_does_not_call_answers_in_text(server: Running) -> None:
    body = {"tools": TOOLS[1:], "max_tokens": 5, "seed": 0}
    answer = (await ask(server, **body)).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert set(choice["message"]) == {"role", "content", "refusal"}
    num_prompt = answer["usage"]["prompt_tokens"]
    assert num_prompt > NUM_HI, "the template tells the model its tools"
    words = story(num_prompt, 5)
    assert choice["message"]["content"] == words
    *_, last = streamed_text = values_of(await ask(server, **body, stream=True))
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in streamed_text)
    assert (text, last["choices"][0]["finish_reason"]) == (words, "length")


@pytest.mark.parametrize("max_tokens", [1, 20])
async def test_forced_call_without_room_for_its_name_shows_nothing(
    server: Running, max_tokens: int
) -> None:
    body = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": max_tokens}
    (choice,) = (await ask(server, **body)).json()["choices"]
    message = {"role": "assistant", "content": "", "refusal": None}
    assert (choice["message"], choice["finish_reason"]) == (message, "length")
    *others, last = values_of(await ask(server, **body, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in others]
    assert deltas == [{"role": "assistant", "content": None, "refusal": None}]
    assert last["choices"][0]["finish_reason"] == "length"


async def test_forced_call_without_room_for_its_arguments_is_cut(server: Running) -> None:
    body = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 50}
    (choice,) = (await ask(server, **body)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == ("weather", "length")


async def test_model_chooses_between_calls_and_the_format_of_an_answer(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"tools": TOOLS, "response_format": wanted, "max_tokens": 2000, "n": 8, "seed": 0}
    reasons = set()
    for choice in (await ask(server, **body)).json()["choices"]:
        message, reason = choice["message"], choice["finish_reason"]
        reasons.add(reason)
        if reason == "tool_calls":
            functions = [call["function"] for call in message["tool_calls"]]
            check([(one["name"], json.loads(one["arguments"])) for one in functions])
        else:
            assert "tool_calls" not in message
            jsonschema.validate(json.loads(message["content"]), schema)
    assert reasons == {"tool_calls", "stop"}


async def test_tool_choice_none_hides_the_tools_from_the_model(server: Running) -> None:
    answer = (await ask(server, tools=TOOLS, tool_choice="none", max_tokens=5, seed=0)).json()
    assert answer["usage"]["prompt_tokens"] == NUM_HI
    assert answer["choices"][0]["message"]["content"] == story(NUM_HI, 5)


async def test_call_and_its_result_can_be_sent_back(server: Running) -> None:
    first = await ask(server, tools=TOOLS, tool_choice=NAMED, seed=1)
    message = first.json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}
    again = await ask(server, messages=[*HI, message, result], tools=TOOLS, max_tokens=1)
    assert again.status_code == 200, again.text


async def test_truncated_call_has_finish_reason_length(server: Running) -> None:
    options = {"tools": TOOLS, "tool_choice": NAMED, "seed": 0}
    response = await ask(server, **options, stop='"place')
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": "{"}


async def test_schema_that_is_not_supported_is_refused_by_the_name_of_the_tools(
    server: Running,
) -> None:
    """What `tool_use` refuses is in `test_tools`."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    response = await ask(server, tools=[tool])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


async def test_template_without_tools_allows_forced_calls_only() -> None:
    constraints = FormatCompiler(cast(Tokenizer, ByteTokenizer()))
    engine, template = FakeEngine(matchers=constraints.matcher), ChatTemplate("hi")
    async with running(engine, constraints=constraints, chat_template=template) as server:
        refused = await ask(server, tools=TOOLS)
        assert refused.json()["error"]["param"] == "tools"
        (calls,) = calls_of(await ask(server, tools=TOOLS, tool_choice=NAMED, seed=0))
        check(calls)


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_called_and_all_are_shown(server: Running, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "wait"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    all_shown = await ask(server, tools=TOOLS, tool_choice="required", max_tokens=200)
    for seed in range(4):
        response = await ask(server, tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=200)
        found = response.json()
        assert response.status_code == 200, response.text
        assert found["usage"]["prompt_tokens"] == all_shown.json()["usage"]["prompt_tokens"]
        message = found["choices"][0]["message"]
        assert mode == "auto" or message["tool_calls"]
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        assert set(names) <= {"wait"}


async def test_tool_that_is_allowed_must_be_one_of_the_tools(server: Running) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "fly"}}]}
    response = await ask(
        server, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")
    response = await ask(
        server, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": {}}
    )
    param = "tool_choice.allowed_tools.mode"
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


#: As that of Qwen3.5 shows tools, calls and results.
QWEN35 = """\
{%- if tools %}
{{- '<tools>' + tools | tojson + '</tools>' }}
{{- '<tool_call>\\n<function=example>\\n<parameter=one>\\nvalue\\n</parameter>' }}
{%- endif %}
{%- for message in messages %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{%- endfor %}
"""


async def called_and_read(source: str) -> tuple[dict[str, Any], str]:
    """Calls with a template come as JSON: arguments of one, and what is read with its result."""
    constraints = FormatCompiler(cast(Tokenizer, ByteTokenizer()))
    engine, template = FakeEngine(matchers=constraints.matcher), ChatTemplate(source)
    async with running(engine, constraints=constraints, chat_template=template) as server:
        assert (await ask(server, tools=TOOLS, max_tokens=5)).status_code == 200
        options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 2000}
        options |= {"parallel_tool_calls": True, "seed": 3}
        (whole,) = calls_of(await ask(server, **options))
        check(whole)
        assert streamed(await ask(server, **options, stream=True)) == whole
        first = await ask(server, tools=TOOLS, tool_choice=NAMED, max_tokens=2000)
        message = first.json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}
        body = {"messages": [*HI, message, result], "tools": TOOLS, "max_tokens": 1}
        again = (await ask(server, **body, return_token_ids=True)).json()
        read = bytes(again["prompt_token_ids"]).decode()
        return json.loads(call["function"]["arguments"]), read


async def test_calls_by_parameters_are_shown_as_json() -> None:
    arguments, read = await called_and_read(QWEN35)
    assert f"<function=weather>\n<parameter=place>\n{arguments['place']}\n" in read
    assert read.endswith("</function>\n</tool_call>It rains.")


#: As that of Nemotron-Nano-v2.
NEMOTRON = """\
{%- if tools %}
{{- '<AVAILABLE_TOOLS>' + tools | tojson + '</AVAILABLE_TOOLS>' }}
{{- '<TOOLCALL>[{"name": "NAME", "arguments": "ARGUMENTS"}]</TOOLCALL>' }}
{%- endif %}
{%- for message in messages %}
{{- message.content or '' }}
{%- if message.tool_calls %}
{{- '<TOOLCALL>[' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}' + (', ' if not loop.last else '') }}
{%- endfor %}
{{- ']</TOOLCALL>' }}
{%- endif %}
{%- endfor %}
"""


async def test_calls_in_a_list_of_json_are_shown_one_by_one() -> None:
    arguments, read = await called_and_read(NEMOTRON)
    call_text = f'{{"name": "weather", "arguments": {json.dumps(arguments)}}}'
    assert read.endswith(f"<TOOLCALL>[{call_text}]</TOOLCALL>It rains.")


#: As those of LFM2 and of LFM2.5 show tools and results; they write no calls.
LFM2 = """\
{%- if tools %}
{{- 'List of tools: <|tool_list_start|>[' + (tools | map('tojson') | join(', ')) + ']' }}
{%- endif %}
{%- for message in messages %}
{{- message.content if message.content is string else message.content | tojson }}
{%- endfor %}
"""
#: As newer ones, which write calls by themselves.
LFM25 = LFM2.replace("<|tool_list_start|>", "").replace(
    "{%- endfor",
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<|tool_call_start|>[own ' + call.function.name + ']<|tool_call_end|>' }}"
    "{%- endfor %}{%- endfor",
)


@pytest.mark.parametrize("source", [LFM2, LFM25], ids=["lfm2", "lfm2.5"])
async def test_calls_in_a_python_list_are_shown_as_json(source: str) -> None:
    arguments, read = await called_and_read(source)
    call_text = f"weather({', '.join(f'{k}={literal(v)}' for k, v in arguments.items())})"
    said = call_text if source == LFM2 else "own weather"
    assert read.endswith(f"<|tool_call_start|>[{said}]<|tool_call_end|>It rains.")
