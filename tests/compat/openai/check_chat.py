"""Chat: whole, streamed, parsed into a class, with tools."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from served import ENDLESS, MODEL, QUESTION, async_client, client

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "maxLength": 12},
                "unit": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["place", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
            "required": ["hour"],
            "additionalProperties": False,
        },
    },
}


class Pet(BaseModel):
    """What the model must write, however little it knows of pets."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=20)


def test_chat_has_a_message_and_usage() -> None:
    with client() as api:
        answer = api.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "system", "content": "You tell stories."},
                *QUESTION,
                {"role": "assistant", "content": "It was old."},
                {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
            ],
            max_completion_tokens=12,
            logprobs=True,
            top_logprobs=2,
            n=2,
            seed=1,
            extra_body=ENDLESS,
        )
    assert [choice.index for choice in answer.choices] == [0, 1]
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 12
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_stream_equals_the_whole_answer() -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "max_tokens": 16,
        "seed": 4,
        "extra_body": ENDLESS,
    }
    with client() as api:
        whole = api.chat.completions.create(**asked)
        chunks = list(
            api.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        )
    last = chunks.pop()
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 16
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_parse_gives_an_instance_of_the_class() -> None:
    with client() as api:
        answer = api.chat.completions.parse(
            model=MODEL, messages=QUESTION, response_format=Pet, max_tokens=200, seed=2
        )
    pet = answer.choices[0].message.parsed
    assert isinstance(pet, Pet)
    assert answer.choices[0].finish_reason == "stop"


def test_parse_reports_a_truncated_answer() -> None:
    with client() as api, pytest.raises(openai.LengthFinishReasonError):
        api.chat.completions.parse(
            model=MODEL, messages=QUESTION, response_format=Pet, max_tokens=3
        )


def test_events_of_a_parsed_stream() -> None:
    with (
        client() as api,
        api.chat.completions.stream(
            model=MODEL, messages=QUESTION, response_format=Pet, max_tokens=200, seed=2
        ) as stream,
    ):
        types = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= types
    assert isinstance(final.choices[0].message.parsed, Pet)


def test_json_object_parses() -> None:
    with client() as api:
        answer = api.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            response_format={"type": "json_object"},
            max_tokens=400,
            temperature=0,
        )
    choice = answer.choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    else:
        assert (choice.message.content or "").startswith("{")


def test_forced_tool_is_called_with_arguments_of_its_schema() -> None:
    with client() as api:
        answer = api.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            tools=[WEATHER, CLOCK],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            max_tokens=200,
            seed=1,
        )
    choice = answer.choices[0]
    assert choice.finish_reason in ("tool_calls", "stop")
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"place", "unit"}
    assert arguments["unit"] in ("C", "F")


def test_streamed_tool_call_is_put_together() -> None:
    with (
        client() as api,
        api.chat.completions.stream(
            model=MODEL,
            messages=QUESTION,
            tools=[WEATHER],
            tool_choice="required",
            max_tokens=200,
            seed=3,
        ) as stream,
    ):
        types = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in types
    assert "tool_calls.function.arguments.done" in types
    calls = final.choices[0].message.tool_calls
    assert calls
    assert calls[0].id
    assert set(json.loads(calls[0].function.arguments)) == {"place", "unit"}


def test_answer_with_a_call_can_be_sent_back_with_its_result() -> None:
    with client() as api:
        first = api.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            tools=[CLOCK],
            tool_choice="required",
            max_tokens=100,
            seed=1,
        ).choices[0]
        assert first.message.tool_calls
        answer = api.chat.completions.create(
            model=MODEL,
            messages=[
                *QUESTION,
                first.message,
                {
                    "role": "tool",
                    "tool_call_id": first.message.tool_calls[0].id,
                    "content": "It is noon.",
                },
            ],
            tools=[CLOCK],
            tool_choice="none",
            max_tokens=8,
        )
    assert answer.choices[0].message.content


def test_async_client_chats() -> None:
    async def ask() -> str:
        async with async_client() as api:
            stream = await api.chat.completions.create(
                model=MODEL, messages=QUESTION, max_tokens=8, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(ask())


def test_image_is_refused_by_name() -> None:
    picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/cat.png"}}
    with client() as api, pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [picture]}], max_tokens=2
        )
    assert "image_url" in str(caught.value)
