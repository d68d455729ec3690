"""Calls of functions and formats in responses; `tests.server.api.openai.test_tools` has more."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import cast

import pytest
import pytest_asyncio

from model.chat import ChatTemplate
from model.tokenizer import Tokenizer
from server.constraints.compiler import FormatCompiler
from tests.fakes import ByteTokenizer, FakeEngine
from tests.server.api.openai.responding import ask, asked, error_of, events_of, get, text_of
from tests.server.harness import Running, running

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
ROOMY = {"max_output_tokens": 200, "tools": [TOOL]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Running]:
    """One for all tests: a compiler of formats and a renderer of templates are processes."""
    constraints = FormatCompiler(cast(Tokenizer, ByteTokenizer()))
    engine = FakeEngine(matchers=constraints.matcher)
    async with running(engine, constraints=constraints) as started:
        yield started


async def test_required_call_is_an_item(server: Running) -> None:
    response = await asked(server, tool_choice="required", **ROOMY)
    assert response["status"] == "completed"
    call = response["output"][0]
    assert (call["type"], call["name"]) == ("function_call", "weather")
    assert json.loads(call["arguments"])["city"] in ("Oslo", "Rome")
    assert response["tools"] == [TOOL]
    assert response["tool_choice"] == "required"


async def test_streamed_call_is_read_again_as_it_was(server: Running) -> None:
    choice = {"type": "function", "name": "weather"}
    events = events_of(await ask(server, tool_choice=choice, stream=True, **ROOMY))
    id = events[0]["response"]["id"]
    deltas = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
    assert "".join(deltas) == events[-1]["response"]["output"][0]["arguments"]
    assert events_of(await get(server, id, stream="true")) == events
    assert (await get(server, id)).json() == events[-1]["response"]


async def test_result_of_a_call_follows_it_in_its_session(server: Running) -> None:
    first = await asked(server, tool_choice={"type": "function", "name": "weather"}, **ROOMY)
    call = first["output"][0]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    body = {**ROOMY, "input": [result], "previous_response_id": first["id"]}
    second = await asked(server, **body)
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == first["usage"]["total_tokens"]
    without = await asked(server, **{**body, "tools": []})
    assert without["usage"]["input_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(("max_output_tokens", "stream"), [(1, True), (60, False)])
async def test_truncated_text_with_tools_is_incomplete(
    server: Running, max_output_tokens: int, stream: bool
) -> None:
    body = {"tools": [TOOL], "max_output_tokens": max_output_tokens, "stream": stream}
    answer = await ask(server, **body)
    response = events_of(answer)[-1]["response"] if stream else answer.json()
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert text_of(response)


async def test_model_that_was_told_to_call_is_not_told_so_in_the_next_turn() -> None:
    source = (
        "{% if tools %}Calls: <tool_call>, arguments. {% endif %}"
        "{% if tool_choice == 'required' %}Call! {% endif %}"
        "{% for message in messages %}{{ message.content or '' }}\n\n{% endfor %}"
    )
    constraints = FormatCompiler(cast(Tokenizer, ByteTokenizer()))
    engine = FakeEngine(matchers=constraints.matcher)
    template = ChatTemplate(source)
    async with running(engine, constraints=constraints, chat_template=template) as server:
        body = {**ROOMY, "return_token_ids": True}
        first = await asked(server, tool_choice="required", **body)
        assert bytes(first["prompt_token_ids"]) == b"Calls: <tool_call>, arguments. Call! hi\n\n"
        body |= {"input": "more", "previous_response_id": first["id"]}
        second = await asked(server, **body)
        assert bytes(second["prompt_token_ids"]).startswith(
            b"Calls: <tool_call>, arguments. hi\n\n"
        )
        body["previous_response_id"] = second["id"]
        assert bytes((await asked(server, **body))["prompt_token_ids"]) == b"\n\nmore\n\n"


async def test_forced_call_without_room_for_its_name_shows_nothing(server: Running) -> None:
    body = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 9}
    events = events_of(await ask(server, **body, stream=True))
    response = events[-1]["response"]
    assert (response["status"], text_of(response)) == ("incomplete", "")
    assert not any(event["type"] == "response.output_text.delta" for event in events)


async def test_call_that_is_cut_is_incomplete(server: Running) -> None:
    forced = {"tools": [TOOL], "tool_choice": "required"}
    short = await asked(server, **forced, max_output_tokens=50)
    stopped = await asked(server, **forced, max_output_tokens=200, stop='"city')
    for response, status in ((short, "incomplete"), (stopped, "completed")):
        (call,) = response["output"]
        assert (response["status"], call["status"]) == (status, "incomplete")


async def test_text_matches_a_schema(server: Running) -> None:
    format = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    response = await asked(server, text={"format": format}, max_output_tokens=100)
    assert json.loads(text_of(response))["city"] in ("Oslo", "Rome")
    assert response["text"] == {"format": format}


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ({"type": "regex", "regex": "a[bc]d"}, ("abd", "acd")),
        ({"type": "choice", "choices": ["yes", "no"]}, ("yes", "no")),
        ({"type": "grammar", "grammar": 'start: "x" "y"'}, ("xy",)),
    ],
)
async def test_text_matches_our_own_formats(
    server: Running, format: dict[str, object], text: tuple[str, ...]
) -> None:
    response = await asked(server, text={"format": format}, max_output_tokens=20)
    assert text_of(response) in text
    assert response["status"] == "completed"


async def test_formats_and_tools_that_cannot_be_are_refused_by_their_name(server: Running) -> None:
    bad = {"type": "regex", "regex": "("}
    assert (await error_of(await ask(server, text={"format": bad})))[2] == "text"
    unknown = {"type": "function", "name": "other"}
    assert (await error_of(await ask(server, tool_choice=unknown, **ROOMY)))[2] == "tool_choice"
    assert (await error_of(await ask(server, tool_choice="required")))[2] == "tool_choice"
    twice = await ask(server, tools=[TOOL, TOOL])
    assert (await error_of(twice))[2] == "tools"
    wrong = {**TOOL, "parameters": {"type": "object", "properties": {"a": {"type": "colour"}}}}
    answer = await ask(server, tools=[wrong], tool_choice="required")
    assert (await error_of(answer))[2] == "tools"


@pytest.mark.parametrize("kind", ["web_search", "custom"])
async def test_a_tool_that_is_no_function_is_left_out_and_listed(
    server: Running, kind: str
) -> None:
    """And the functions next to it work; errors have the client's numbers."""
    other = {"type": kind, "name": "x", "tools": [TOOL]}
    asked_for = {"tool_choice": "required", "max_output_tokens": 200}
    answer = await ask(server, tools=[other, TOOL, other], **asked_for)
    assert answer.headers["x-everstream-ignored"] == f"tools.{kind}"
    assert [tool["name"] for tool in answer.json()["tools"]] == ["weather"]
    assert answer.json()["output"][-1]["type"] == "function_call"
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": kind, kind: {}}]}
    answer = await server.http.post("/v1/chat/completions", json=body | {"max_tokens": 2})
    assert answer.status_code == 200
    assert answer.headers["x-everstream-ignored"] == f"tools.{kind}"
    answer = await ask(server, tools=[other, {**TOOL, "name": "a b"}])
    assert (await error_of(answer))[2] == "tools[1].name"


async def test_allowed_tools_are_those_that_may_be_called(server: Running) -> None:
    tools = [TOOL, {"type": "function", "name": "wait"}]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    }
    for seed in range(4):
        response = await asked(
            server, tools=tools, tool_choice=choice, seed=seed, max_output_tokens=200
        )
        assert [item["name"] for item in response["output"]] == ["weather"]
    assert response["tool_choice"] == choice
    assert response["tools"] == tools
    answer = await ask(server, tools=tools[1:], tool_choice=choice)
    assert await error_of(answer) == (400, "invalid_value", "tool_choice")
