"""Thinking in `POST /v1/chat/completions`: apart from the answer, counted, and asked for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest

from model.chat import ChatTemplate
from model.tokenizer import Tokenizer
from server.constraints.compiler import FormatCompiler
from tests.fakes import ByteTokenizer
from tests.server.api.openai.thinking import (
    ANSWER,
    ASKED,
    NUM_SAID,
    NUM_THOUGHT,
    OFF,
    ON,
    SAID,
    THOUGHT,
    thinking_server,
)
from tests.server.api.talk import values_of
from tests.server.harness import Running

pytestmark = pytest.mark.process

HI = [{"role": "user", "content": "hi"}]


async def ask(server: Running, **body: Any) -> httpx.Response:
    given = {"messages": HI, "seed": 0, "max_tokens": 200, **body}
    return await server.http.post("/v1/chat/completions", json=given)


async def answer(server: Running, **body: Any) -> dict[str, Any]:
    response = await ask(server, **body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


async def test_message_has_separate_thinking() -> None:
    async with thinking_server(reasoning="on") as server:
        found = await answer(server)
    (choice,) = found["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": ANSWER,
        "refusal": None,
        "reasoning_content": THOUGHT,
    }
    assert choice["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == NUM_SAID
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}


async def test_stream_has_deltas_of_the_thinking_before_those_of_the_answer() -> None:
    async with thinking_server(reasoning="on") as server:
        told = values_of(await ask(server, stream=True, stream_options={"include_usage": True}))
    *parts, end = told
    deltas = [chunk["choices"][0]["delta"] for chunk in parts]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    thoughts = [delta.get("reasoning_content") for delta in deltas[1:]]
    texts = [delta.get("content") for delta in deltas[1:]]
    assert "".join(filter(None, thoughts)) == THOUGHT
    assert "".join(filter(None, texts)) == ANSWER
    last_thought = max(i for i, thought in enumerate(thoughts) if thought)
    assert last_thought < min(i for i, text in enumerate(texts) if text)
    assert end["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}
    *middle, last = deltas[1:]
    assert all(len(delta) == 1 and all(delta.values()) for delta in middle) and last == {}


@pytest.mark.parametrize("setting", [None, "off", "template"])
async def test_model_that_is_not_to_think_answers_at_once(setting: str | None) -> None:
    """With the thinking skipped, or in the plain turns of its checkpoint."""
    is_plain = setting == "template"
    said = " Hello!\n\nUser:" if is_plain else ">\n\nHello!\n\nUser:"
    after = ASKED + ("" if is_plain else OFF)
    async with thinking_server(said, after, reasoning=setting) as server:
        found = await answer(server)
    assert found["choices"][0]["message"]["content"] == "Hello!"
    assert "reasoning_content" not in found["choices"][0]["message"]
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_model_may_open_the_thinking() -> None:
    said = " <think" + SAID
    async with thinking_server(said, ASKED, reasoning="template") as server:
        message = (await answer(server))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, ANSWER)


@pytest.mark.parametrize(
    ("body", "setting", "prompt"),
    [
        ({"reasoning_effort": "none"}, "on", "User: hi\n\nAssistant:" + OFF),
        ({"reasoning_effort": "low"}, None, "User: hi (think a bit)\n\nAssistant:" + ON),
        ({"reasoning_effort": "minimal"}, "on", "User: hi (think a bit)\n\nAssistant:" + ON),
        ({"reasoning_effort": "medium"}, "off", "User: hi (think)\n\nAssistant:" + ON),
        ({"reasoning_effort": "high"}, "5", "User: hi (think a lot)\n\nAssistant:" + ON),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "on", ASKED + OFF),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "off", ASKED + ON),
        ({}, "7", ASKED + ON),
    ],
)
async def test_request_overrides_the_server_setting(
    body: dict[str, Any], setting: str | None, prompt: str
) -> None:
    async with thinking_server(reasoning=setting) as server:
        found = await answer(server, **{**body, "max_tokens": 1})
    assert found["usage"]["prompt_tokens"] == 1 + len(prompt)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"reasoning_effort": "xhigh"}, "reasoning_effort"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
            "chat_template_kwargs",
        ),
    ],
)
async def test_what_the_model_does_not_know_is_refused(body: dict[str, Any], param: str) -> None:
    async with thinking_server() as server:
        assert error_of(await ask(server, **body))[:2] == (400, param)


async def test_model_without_levels_or_thinking_refuses_them() -> None:
    switch = "{{ messages[0].content }}{% if enable_thinking %}<think>{% else %}</think>{% endif %}"
    async with thinking_server(chat_template=ChatTemplate(switch)) as server:
        status, param, message = error_of(await ask(server, reasoning_effort="high"))
        assert (status, param) == (400, "reasoning_effort") and "none or medium" in message
        assert (await ask(server, reasoning_effort="medium")).status_code == 200
    async with thinking_server(chat_template=ChatTemplate("{{ messages[0].content }}")) as server:
        status, param, message = error_of(await ask(server, reasoning_effort="medium"))
        assert (status, param) == (400, "reasoning_effort") and "does not reason" in message
        assert (await ask(server, reasoning_effort="none")).status_code == 200


async def test_tokens_of_messages_are_those_that_a_chat_reads() -> None:
    async with thinking_server(reasoning="on") as server:
        told = (await server.http.post("/tokenize", json={"messages": HI})).json()
    assert told["count"] == 1 + len(ASKED + ON)


async def test_budget_of_the_server_closes_the_thinking() -> None:
    said = ">\nLet" + "?" * len("\n</think>\n") + "Hello!\n\nUser:"
    async with thinking_server(said, reasoning="5") as server:
        found = await answer(server)
    message = found["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let", "Hello!")
    num_thought = len(">\nLet\n</think>")
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}


async def test_template_that_always_thinks_is_closed_where_it_may_not() -> None:
    always = ChatTemplate("{{ messages[0].content }}<think>\n{# </think> #}")
    said = "?" * len("\n</think>\n\n") + "Hello!"
    settings: dict[str, Any] = {"chat_template": always, "reasoning": "off"}
    async with thinking_server(said, "hi<think>", **settings) as server:
        message = (await answer(server))["choices"][0]["message"]
    assert message["content"] == "Hello!"
    assert "reasoning_content" not in message


async def test_thinking_that_is_not_finished_has_no_answer() -> None:
    async with thinking_server(reasoning="on") as server:
        (choice,) = (await answer(server, max_tokens=9))["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "Let me"
    assert choice["finish_reason"] == "length"


async def test_stop_strings_are_for_the_answer() -> None:
    async with thinking_server(reasoning="on") as server:
        message = (await answer(server, stop=["e", "\n"]))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, "H")


async def test_ends_of_turns_do_not_end_it_where_they_are_ignored() -> None:
    async with thinking_server(reasoning="on") as server:
        found = await answer(server, ignore_eos=True, max_tokens=len(SAID))
    assert found["choices"][0]["message"]["content"] == ANSWER + "\n\nUser: and"


async def test_logprobs_are_those_of_the_answer() -> None:
    async with thinking_server(reasoning="on") as server:
        whole = await answer(server, logprobs=True)
        told = values_of(await ask(server, logprobs=True, stream=True))
    tokens = [entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]]
    assert "".join(tokens) == ANSWER + "\n\nUser:"
    streamed = [
        entry["token"]
        for chunk in told
        for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", ())
    ]
    assert streamed == tokens


async def test_each_choice_has_its_own_thinking() -> None:
    said = ">\n" + "so so so so so\n</think>\n" + ANSWER + "\n\nUser:"
    async with thinking_server(said, reasoning="on") as server:
        found = await answer(server, n=2)
    first, second = (choice["message"] for choice in found["choices"])
    assert first["content"] == second["content"] == ANSWER
    assert first["reasoning_content"] == "so so so so so"
    assert second["reasoning_content"] == " so so so"[1:]
    total = len(">\nso so so so so\n</think>") * 2 - 7
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": total}


@pytest.fixture
async def constraints() -> AsyncIterator[FormatCompiler]:
    made = FormatCompiler(cast(Tokenizer, ByteTokenizer()))
    yield made
    await made.close()


FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "x",
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize(
    ("effort", "after", "said"),
    [
        ("medium", "User: hi (think)\n\nAssistant:" + ON, '>\nLet me see.\n</think>\n{"a":true}'),
        ("none", ASKED + OFF + ">\n", '{"a":true}'),
        (None, ASKED + OFF + ">\n", '{"a":true}'),
        ("plain", ASKED + " ", '{"a":true}'),
    ],
)
async def test_format_is_that_of_the_answer_alone(
    constraints: FormatCompiler, effort: str | None, after: str, said: str
) -> None:
    given = {} if effort == "plain" else {"reasoning_effort": effort}
    setting = "template" if effort == "plain" else None
    async with thinking_server(said, after, constraints=constraints, reasoning=setting) as server:
        found = await answer(server, response_format=FORMAT, **given)
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"].get("reasoning_content") == (THOUGHT if effort == "medium" else None)
    assert json.loads(choice["message"]["content"]) == {"a": True}


@pytest.mark.parametrize("streams", [False, True])
async def test_call_of_a_tool_comes_after_the_thinking(
    constraints: FormatCompiler, streams: bool
) -> None:
    called = '```json\n{"name": "wait", "arguments": {}}\n```'
    tool = {"type": "function", "function": {"name": "wait"}}
    body = {"tools": [tool], "add_generation_prompt": True}
    async with thinking_server(reasoning="on", constraints=constraints) as server:
        probe = await answer(server, **body, max_tokens=1)
        after = "x" * (probe["usage"]["prompt_tokens"] - 1)
    said = ">\nLet me see.\n</think>\n" + called
    async with thinking_server(said, after, reasoning="on", constraints=constraints) as server:
        if not streams:
            (choice,) = (await answer(server, **body))["choices"]
            message, reason = choice["message"], choice["finish_reason"]
            calls = message["tool_calls"]
        else:
            told = [c["choices"][0] for c in values_of(await ask(server, **body, stream=True))]
            thoughts = [c["delta"].get("reasoning_content", "") for c in told]
            message = {"reasoning_content": "".join(thoughts), "content": None}
            calls = [call for c in told for call in c["delta"].get("tool_calls", ())]
            reason = told[-1]["finish_reason"]
    assert message["reasoning_content"] == THOUGHT and message["content"] is None
    assert calls[0]["function"]["name"] == "wait"
    assert "".join(call["function"]["arguments"] for call in calls) == "{}"
    assert reason == "tool_calls"
