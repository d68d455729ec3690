"""Tools: called whole and in a stream, their results sent back; by the package's own runner."""

from __future__ import annotations

from typing import Any

from anthropic import beta_tool
from served import MODEL, QUESTION, WEATHER, client

CHOICE: dict[str, Any] = {"type": "tool", "name": "weather"}
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": QUESTION}


def test_tool_is_called_and_its_result_is_read() -> None:
    with client() as api:
        answer = api.messages.create(**ASKED, tools=[WEATHER], tool_choice=CHOICE)
        (call,) = answer.content
        assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
        assert call.input["unit"] in ("C", "F")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
        turns = [
            *QUESTION,
            {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
            {"role": "user", "content": [result, {"type": "text", "text": "And tomorrow?"}]},
        ]
        final = api.messages.create(
            model=MODEL,
            max_tokens=8,
            messages=turns,
            tools=[WEATHER],
            tool_choice={"type": "none"},
        )
    assert final.content[0].type == "text"


def test_stream_has_the_same_call() -> None:
    with (
        client() as api,
        api.messages.stream(**ASKED, tools=[WEATHER], tool_choice=CHOICE) as stream,
    ):
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(parts) > 1
    (call,) = final.content
    assert call.type == "tool_use"
    assert call.input["unit"] in ("C", "F")


@beta_tool
def place_of(hour: int) -> str:
    """Where one is at an hour.

    Args:
        hour: The hour of the day.
    """
    return f"At {hour} o'clock in the mill."


def test_runner_calls_the_function_and_asks_again() -> None:
    """The package runs a Python function for each call; this model must call in every turn."""
    with client() as api:
        runner = api.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=300,
            messages=QUESTION,
            tools=[place_of],
            tool_choice={"type": "any"},
            max_iterations=2,
        )
        answers = list(runner)
    assert len(answers) == 2
    assert all(block.type == "tool_use" for answer in answers for block in answer.content)
