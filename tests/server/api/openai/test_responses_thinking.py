"""Thinking in `/v1/responses`: items of their own, and what continues after it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api.openai.responding import ask as ask_for
from tests.server.api.openai.responding import (
    asked,
    create,
    events_of,
    get,
    socket_of,
    streamed_text,
    text_of,
    until_end,
)
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

pytestmark = pytest.mark.process

HI = {"role": "user", "content": "hi"}
LONG = {"max_output_tokens": 200}
#: Of the two items, in their order.
EVENTS = [
    *("created", "in_progress"),
    *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
    *("content_part.done", "output_item.done"),
    *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
    *("content_part.done", "output_item.done"),
    "completed",
]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of events, of each run of deltas one."""
    found = [event["type"].removeprefix("response.") for event in events]
    return [
        kind
        for kind, before in zip(found, ["", *found[:-1]], strict=True)
        if not (kind == before and kind.endswith("delta"))
    ]


async def test_thinking_is_an_item_before_the_message() -> None:
    async with thinking_server(reasoning="on") as server:
        response = await asked(server, **LONG)
        again = (await get(server, response["id"])).json()
    thinking, message = response["output"]
    assert thinking == {
        "id": thinking["id"],
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": THOUGHT}],
    }
    assert thinking["id"].startswith("rs_")
    assert message["type"] == "message" and text_of(response) == ANSWER
    assert response["status"] == "completed"
    assert response["usage"]["output_tokens"] == NUM_SAID
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}
    assert again == response


async def test_stream_has_the_events_of_both_items() -> None:
    async with thinking_server(reasoning="on") as server:
        events = events_of(await ask_for(server, **LONG, stream=True))
        id = events[-1]["response"]["id"]
        again = events_of(await get(server, id, stream="true", starting_after=20))
    assert kinds(events) == EVENTS
    deltas = [e for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(event["delta"] for event in deltas) == THOUGHT
    (done,) = (e for e in events if e["type"] == "response.reasoning_text.done")
    assert done["text"] == THOUGHT
    assert {(e["output_index"], e["content_index"]) for e in (*deltas, done)} == {(0, 0)}
    assert streamed_text(events) == ANSWER
    assert again == events[21:]


async def test_socket_sends_the_same_events() -> None:
    async with thinking_server(reasoning="on") as server, socket_of(server) as socket:
        await create(socket, **LONG)
        events = await until_end(socket)
    assert kinds(events) == EVENTS
    assert streamed_text(events) == ANSWER


async def test_thinking_that_is_cut_is_an_incomplete_item() -> None:
    async with thinking_server(reasoning="on") as server:
        response = await asked(server, max_output_tokens=9)
    (thinking,) = response["output"]
    assert (thinking["type"], thinking["status"]) == ("reasoning", "incomplete")
    assert thinking["content"][0]["text"] == "Let me"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_thinking_that_is_cut_can_be_sent_back() -> None:
    """As an answer without a word, also where it is all there is."""
    asked_again = {"role": "user", "content": "Go on"}
    async with thinking_server(reasoning="on") as server:
        first = await asked(server, max_output_tokens=9)
        alone = await asked(server, input=first["output"])
        by_items = await asked(server, input=[HI, *first["output"], asked_again])
        by_name = await asked(server, input="Go on", previous_response_id=first["id"])
    assert alone["usage"]["input_tokens"] == 1 + len("Assistant:\n\nAssistant:" + ON)
    prompt = "User: hi\n\nAssistant:\n\nUser: Go on\n\nAssistant:" + ON
    for response in (by_items, by_name):
        assert response["usage"]["input_tokens"] == 1 + len(prompt)


async def test_effort_is_echoed_and_asks_for_thinking() -> None:
    async with thinking_server() as server:
        for effort, prompt in (
            ("none", ASKED + OFF),
            ("high", "User: hi (think a lot)\n\nAssistant: <think"),
        ):
            response = await asked(server, reasoning={"effort": effort})
            assert response["reasoning"] == {"effort": effort, "summary": None}
            again = await asked(server, reasoning={"effort": effort, "summary": "auto"})
            assert again["reasoning"] == response["reasoning"]  # which asks for none
            assert response["usage"]["input_tokens"] == 1 + len(prompt)


@pytest.mark.parametrize(
    ("reasoning", "param"),
    [
        ({"effort": "xhigh"}, "reasoning.effort"),
        ({"effort": "huge"}, "reasoning.effort"),
        ({"summary": "detailed"}, "reasoning.summary"),
        ({"generate_summary": "concise"}, "reasoning.generate_summary"),
        ({"mood": "glad"}, "reasoning.mood"),
    ],
)
async def test_what_is_not_supported_is_refused(reasoning: dict[str, Any], param: str) -> None:
    async with thinking_server() as server:
        answer = await ask_for(server, reasoning=reasoning)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_conversation_continues_from_the_state_without_thinking() -> None:
    said = " Hello!\n\nUser: what"
    async with thinking_server(said, ASKED, reasoning="template") as server:
        first = await asked(server, **LONG)
        before = (await server.stats()).prompt_tokens_total
        second = await asked(server, input="more", previous_response_id=first["id"])
        read = (await server.stats()).prompt_tokens_total - before
    new = " more\n\nAssistant:"
    assert text_of(first) == "Hello!"
    assert read == len(new)
    whole = ASKED + " Hello!\n\nUser:" + new
    assert second["usage"]["input_tokens"] == 1 + len(whole)


@pytest.mark.parametrize(("setting", "after"), [("on", ASKED + " <think"), ("off", ASKED + OFF)])
async def test_conversation_is_read_again_without_its_thinking(setting: str, after: str) -> None:
    said = SAID if setting == "on" else ">\n" + ANSWER + "\n\nUser:"
    async with thinking_server(said, after, reasoning=setting) as server:
        first = await asked(server, **LONG)
        second = await asked(server, input="more", previous_response_id=first["id"])
    end = after.removeprefix(ASKED)
    whole = f"{ASKED} {ANSWER}\n\nUser: more\n\nAssistant:{end}"
    assert text_of(first) == ANSWER
    assert second["usage"]["input_tokens"] == 1 + len(whole)


async def test_items_of_thinking_can_be_sent_back_and_referred_to() -> None:
    async with thinking_server(reasoning="on") as server:
        first = await asked(server, **LONG)
        (thinking, message) = first["output"]
        more = {"role": "user", "content": "more"}
        hi = {"role": "user", "content": "hi"}
        whole = await asked(server, input=[hi, thinking, message, more])
        named = [{"type": "item_reference", "id": item["id"]} for item in (thinking, message)]
        referred = await asked(server, input=[hi, *named, more])
        listed = (await get(server, whole["id"], "/input_items", order="asc")).json()["data"]
    prompt = f"{ASKED} {ANSWER}\n\nUser: more\n\nAssistant: <think"
    for response in (whole, referred):
        assert response["usage"]["input_tokens"] == 1 + len(prompt)
    assert [item["type"] for item in listed] == ["message", "reasoning", "message", "message"]
    assert listed[1]["content"] == thinking["content"]


async def test_logprobs_are_those_of_the_message() -> None:
    more = {"include": ["message.output_text.logprobs"], **LONG}
    async with thinking_server(reasoning="on") as server:
        response = await asked(server, **more)
    tokens = [entry["token"] for entry in response["output"][1]["content"][0]["logprobs"]]
    assert "".join(tokens) == ANSWER
