"""Answers go back as client libraries hold them; what is new in a request stays strict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.api.chat.messages import AssistantMessage, ToolMessage
from server.api.openai.chat import ChatBody
from server.api.openai.responses.items import ResponsesBody
from server.api.schemas.wire import parse_body
from server.errors import InvalidRequest

Json = dict[str, Any]

CALL: Json = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": "{}"},
}
HI: Json = {"role": "user", "content": "hi"}
RESULT: Json = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}

#: What libraries hold in addition to what they were answered: openai's parsed classes, its streams,
#: LiteLLM, LangChain, DeepSeek's and others' reasoning, Anthropic's marks.
HELD_BY_ASSISTANTS: list[Json] = [
    {"parsed": {"a": 1}},
    {"annotations": [], "audio": None, "function_call": None, "refusal": None},
    {"annotations": [{"type": "url_citation"}]},
    {"provider_specific_fields": {"x": [1]}},
    {"reasoning_content": None},
    {"reasoning_content": "hm", "reasoning": "hm", "thinking_blocks": []},
    {"cache_control": {"type": "ephemeral"}},
    {"id": "msg_1", "index": 0},
    {"additional_kwargs": {}, "response_metadata": {}, "usage_metadata": None},
    {"name": "agent"},
    {"content": [{"type": "text", "text": "a", "annotations": [], "cache_control": None}]},
    {"content": [{"type": "refusal", "refusal": "no"}]},
    {"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]},
    {"content": None},
    {"content": None, "reasoning_content": "hm", "tool_calls": None},
]


def chat(*messages: Json) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"messages": messages}).encode())


@pytest.mark.parametrize("more", HELD_BY_ASSISTANTS, ids=" ".join)
def test_answer_goes_back_with_all_that_its_client_holds(more: Json) -> None:
    message = chat(HI, {"role": "assistant", "content": "a", **more}).messages[1]
    assert isinstance(message, AssistantMessage)


@pytest.mark.parametrize(
    "call",
    [
        {**CALL, "index": 0},
        {**CALL, "provider_specific_fields": None},
        {**CALL, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}},
        {"id": "call_1", "function": CALL["function"]},
        {**CALL, "function": {"name": "f", "arguments": None}},
    ],
)
@pytest.mark.parametrize("content", [None, "", []])
def test_call_goes_back_with_all_that_its_client_holds(call: Json, content: object) -> None:
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    said = chat(HI, message, RESULT).messages[1]
    assert isinstance(said, AssistantMessage)
    assert said.tool_calls is not None
    assert said.tool_calls[0].function.name == "f"


@pytest.mark.parametrize(
    "more", [{"name": "f"}, {"id": "m"}, {"status": "success", "artifact": {}}]
)
def test_result_of_a_call_may_have_more(more: Json) -> None:
    message = chat(HI, {**RESULT, **more}).messages[1]
    assert isinstance(message, ToolMessage)


@pytest.mark.parametrize(
    "message",
    [
        {**HI, "id": "m", "cache_control": {"type": "ephemeral"}},
        {**HI, "name": None, "unknown": None},
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
    ],
)
def test_user_message_may_have_fields_without_effect(message: Json) -> None:
    assert chat(message).messages[0].role == "user"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("messages[1].mood", {**HI, "mood": "glad"}),
        (
            "messages[1].content[0].mood",
            {"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}]},
        ),
        ("messages[1].content", {"role": "user"}),
        ("messages[1].name", {**HI, "name": "a b"}),
        ("messages[1]", {"role": "assistant", "text": "a"}),
        ("messages[1].audio", {"role": "assistant", "content": "a", "audio": {"id": "x"}}),
        ("messages[1].function_call", {"role": "assistant", "function_call": {"name": "f"}}),
        ("messages[1].tool_call_id", {"role": "tool", "content": "a"}),
        (
            "messages[1].tool_calls[1].function.arguments",
            {"role": "assistant", "tool_calls": [CALL, {**CALL, "function": {"name": "f"}}]},
        ),
        (
            "messages[1].tool_calls[0].type",
            {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
        ),
    ],
)
def test_refusal_names_the_place(place: str, message: Json) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(HI, message)
    assert refused.value.param == place
    assert refused.value.message.startswith(f"{place}: ")


def test_first_bad_message_is_named_and_not_the_deepest() -> None:
    bad = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": 5}}]}
    with pytest.raises(InvalidRequest) as refused:
        chat({"role": "user", "content": 5}, bad)
    assert refused.value.param == "messages[0].content"


ANSWER: Json = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": None}],
}


@pytest.mark.parametrize(
    "item",
    [
        ANSWER,
        {**ANSWER, "phase": "final_answer", "provider_data": {}},
        {**ANSWER, "content": [{**ANSWER["content"][0], "parsed": {"a": 1}}]},
        {"role": "assistant", "content": "a"},
        {
            "type": "function_call",
            "call_id": "c",
            "name": "f",
            "arguments": "{}",
            "id": "fc_1",
            "status": "completed",
            "parsed_arguments": {},
            "namespace": None,
        },
        {"type": "function_call_output", "call_id": "c", "output": "o", "name": "f"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "item_reference", "id": "msg_1"},
        {"id": "msg_1"},
    ],
)
def test_output_goes_back_as_input(item: Json) -> None:
    parse_body(ResponsesBody, json.dumps({"input": [{**HI}, item]}).encode())


@pytest.mark.parametrize(
    ("place", "item"),
    [
        ("input[0].mood", {**HI, "mood": "glad"}),
        (
            "input[0].content[0].detail",
            {**HI, "content": [{"type": "input_text", "text": "a", "detail": "high"}]},
        ),
        ("input[0].call_id", {"type": "function_call_output", "output": "o"}),
        ("input[0]", {"type": "web_search_call", "id": "w"}),
    ],
)
def test_refusal_of_an_item_names_the_place(place: str, item: Json) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_body(ResponsesBody, json.dumps({"input": [item]}).encode())
    assert refused.value.param == place
