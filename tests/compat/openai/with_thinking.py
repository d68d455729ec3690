"""Thinking, against a server whose model thinks for `BUDGET` tokens before it answers."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from openai.types.responses import ResponseReasoningItem, ResponseReasoningTextDeltaEvent
from served import ENDLESS, async_client, client

MODEL = "thinker"
BUDGET = int(os.environ["BUDGET"])
#: Tokens of the end marker, which the server writes for the model.
NUM_CLOSE = int(os.environ["NUM_CLOSE"])
ASKED: dict[str, Any] = {"model": MODEL, "extra_body": {**ENDLESS, "seed": 1}}
CHAT: dict[str, Any] = {
    **ASKED,
    "messages": [{"role": "user", "content": "What is 12 times 12?"}],
    "max_tokens": BUDGET + NUM_CLOSE + 12,
}
RESPONSE: dict[str, Any] = {
    **ASKED,
    "input": "What is 12 times 12?",
    "max_output_tokens": CHAT["max_tokens"],
}


def test_chat_has_the_thinking_and_its_tokens() -> None:
    with client() as api:
        answer = api.chat.completions.create(**CHAT)
    message = answer.choices[0].message
    assert message.model_extra and message.model_extra["reasoning_content"]
    assert message.content
    assert "think>" not in message.content + message.model_extra["reasoning_content"]
    assert answer.usage and answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens == BUDGET + NUM_CLOSE


def test_stream_has_what_the_whole_answer_has() -> None:
    thought = content = ""
    with client() as api:
        whole = api.chat.completions.create(**CHAT).choices[0].message
        for chunk in api.chat.completions.create(**CHAT, stream=True):
            delta = chunk.choices[0].delta
            thought += (delta.model_extra or {}).get("reasoning_content") or ""
            content += delta.content or ""
    assert whole.model_extra
    assert (thought, content) == (whole.model_extra["reasoning_content"], whole.content)


def test_effort_of_none_answers_at_once() -> None:
    with client() as api:
        answer = api.chat.completions.create(**CHAT, reasoning_effort="none")
    assert "reasoning_content" not in (answer.choices[0].message.model_extra or {})
    assert answer.usage and answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_response_has_an_item_of_reasoning() -> None:
    with client() as api:
        response = api.responses.create(**RESPONSE, reasoning={"effort": "high"})
        again = api.responses.retrieve(response.id)
    thinking, message = response.output
    assert isinstance(thinking, ResponseReasoningItem) and thinking.content
    assert message.type == "message" and response.output_text
    assert response.reasoning and response.reasoning.effort == "high"
    assert response.usage
    assert response.usage.output_tokens_details.reasoning_tokens == BUDGET + NUM_CLOSE
    assert again == response


def test_response_stream_has_typed_events_of_reasoning() -> None:
    with client() as api:
        events = list(api.responses.create(**RESPONSE, stream=True))
    final = events[-1].response
    deltas = [event for event in events if isinstance(event, ResponseReasoningTextDeltaEvent)]
    (thinking, _) = final.output
    assert isinstance(thinking, ResponseReasoningItem) and thinking.content
    assert "".join(event.delta for event in deltas) == thinking.content[0].text
    kinds = [event.type for event in events]
    assert kinds.count("response.reasoning_text.done") == 1
    last = max(index for index, kind in enumerate(kinds) if kind.startswith("response.reasoning"))
    assert last < kinds.index("response.output_text.delta")


def test_socket_sends_them_and_continues_without_the_thinking() -> None:
    last = ("response.completed", "response.incomplete", "response.failed", "error")
    ends = []
    with client() as api, api.responses.connect() as connection:
        for body in ({"input": "What is 12 times 12?"}, {"input": "And 13 times 13?"}):
            previous = {"previous_response_id": ends[-1].response.id} if ends else {}
            limit = RESPONSE["max_output_tokens"]
            connection.response.create(model=MODEL, max_output_tokens=limit, **body, **previous)
            kinds = []
            for event in connection:
                kinds.append(event.type)
                if event.type in last:
                    ends.append(event)
                    break
            assert "response.reasoning_text.delta" in kinds
    assert ends[1].response.previous_response_id == ends[0].response.id


def test_async_client_streams_it_too() -> None:
    async def thoughts() -> list[str]:
        async with async_client() as api:
            stream = await api.chat.completions.create(**CHAT, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in stream]
        return [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]

    assert any(asyncio.run(thoughts()))
