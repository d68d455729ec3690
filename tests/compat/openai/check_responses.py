"""Responses over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from check_chat import Pet
from served import ENDLESS, MODEL, PROMPT, async_client, client

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 12}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


def test_response_has_text_and_usage() -> None:
    with client() as api:
        answer = api.responses.create(
            model=MODEL,
            input=PROMPT,
            max_output_tokens=12,
            metadata={"a": "b"},
            extra_body=ENDLESS,
        )
    assert answer.object == "response"
    assert answer.output_text
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 12
    assert answer.metadata == {"a": "b"}


def test_events_come_in_order_and_add_up() -> None:
    with client() as api:
        events = list(
            api.responses.create(
                model=MODEL,
                input=PROMPT,
                max_output_tokens=12,
                stream=True,
                temperature=0,
                extra_body=ENDLESS,
            )
        )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert {(each.output_index, each.content_index) for each in deltas} == {(0, 0)}
    last = events[-1]
    assert last.type == "response.incomplete"
    assert "".join(each.delta for each in deltas) == last.response.output_text


def test_stream_helper_gives_the_final_response() -> None:
    with (
        client() as api,
        api.responses.stream(
            model=MODEL, input=PROMPT, text_format=Pet, max_output_tokens=200
        ) as stream,
    ):
        types = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.created", "response.output_text.delta", "response.completed"} <= types
    assert isinstance(final.output_parsed, Pet)


def test_parse_gives_an_instance_of_the_class() -> None:
    with client() as api:
        answer = api.responses.parse(
            model=MODEL, input=PROMPT, text_format=Pet, max_output_tokens=200
        )
    assert isinstance(answer.output_parsed, Pet)
    assert answer.status == "completed"


def test_conversation_continues_from_a_response() -> None:
    with client() as api:
        first = api.responses.create(model=MODEL, input=PROMPT, max_output_tokens=8)
        second = api.responses.create(
            model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=8
        )
        assert second.previous_response_id == first.id
        assert second.output_text
        assert api.responses.retrieve(first.id).output_text == first.output_text
        items = list(api.responses.input_items.list(second.id))
        assert [item.type for item in items] == ["message"]
        api.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(first.id)
        assert api.responses.retrieve(second.id).id == second.id


def test_background_response_is_cancelled() -> None:
    with client() as api:
        begun = api.responses.create(
            model=MODEL,
            input=PROMPT,
            max_output_tokens=1_000_000,
            background=True,
            extra_body=ENDLESS,
        )
        assert begun.status in ("queued", "in_progress")
        ended = api.responses.cancel(begun.id)
        assert ended.status == "cancelled"
        assert api.responses.retrieve(begun.id).status == "cancelled"


def test_lost_stream_is_resumed() -> None:
    with client() as api:
        seen = []
        with api.responses.create(
            model=MODEL,
            input=PROMPT,
            max_output_tokens=40,
            stream=True,
            background=True,
            extra_body=ENDLESS,
        ) as stream:
            for event in stream:
                seen.append(event)
                if event.type == "response.output_text.delta" and len(seen) > 8:
                    break
        id = seen[0].response.id
        rest = list(
            api.responses.retrieve(id, stream=True, starting_after=seen[-1].sequence_number)
        )
        numbers = [event.sequence_number for event in [*seen, *rest]]
        assert numbers == list(range(len(numbers)))
        whole = "".join(
            event.delta for event in [*seen, *rest] if event.type == "response.output_text.delta"
        )
        assert whole == api.responses.retrieve(id).output_text


def test_forced_function_is_called_and_answered() -> None:
    with client() as api:
        first = api.responses.create(
            model=MODEL,
            input=PROMPT,
            tools=[WEATHER],
            tool_choice={"type": "function", "name": "weather"},
            max_output_tokens=200,
        )
        call = first.output[0]
        assert call.type == "function_call"
        assert call.name == "weather"
        assert set(json.loads(call.arguments)) == {"place"}
        second = api.responses.create(
            model=MODEL,
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}],
            max_output_tokens=8,
        )
    assert second.output_text


def test_streamed_function_call_adds_up() -> None:
    with client() as api:
        events = list(
            api.responses.create(
                model=MODEL,
                input=PROMPT,
                tools=[WEATHER],
                tool_choice="required",
                max_output_tokens=200,
                stream=True,
            )
        )
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert "".join(pieces) == done.arguments


def test_logprobs_come_where_they_are_asked_for() -> None:
    with client() as api:
        answer = api.responses.create(
            model=MODEL,
            input=PROMPT,
            max_output_tokens=4,
            extra_body=ENDLESS,
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
    message = answer.output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == 4
    assert len(part.logprobs[0].top_logprobs) == 2


def test_async_client_streams() -> None:
    async def ask() -> list[str]:
        async with async_client() as api:
            stream = await api.responses.create(
                model=MODEL,
                input=PROMPT,
                max_output_tokens=8,
                stream=True,
                store=False,
                extra_body=ENDLESS,
            )
            return [event.type async for event in stream]

    assert asyncio.run(ask())[-1] == "response.incomplete"


@pytest.mark.parametrize("field", ["conversation", "prompt", "max_tool_calls"])
def test_unsupported_field_is_refused_by_its_name(field: str) -> None:
    value: Any = {"conversation": "conv_1", "prompt": {"id": "p"}, "max_tool_calls": 3}[field]
    with client() as api, pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(model=MODEL, input=PROMPT, **{field: value})
    assert caught.value.param == field
