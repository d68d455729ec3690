"""What the tests of Anthropic's API say to a server, and how they read its streams."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.server.harness import Running

HI = [{"role": "user", "content": "hi"}]
#: The plain template writes a paragraph.
NUM_HI = len("hi\n\n")

Json = dict[str, Any]


async def ask(server: Running, **body: Any) -> httpx.Response:
    given = {"model": "fake", "max_tokens": 20, "seed": 0, "messages": HI, **body}
    return await server.http.post("/v1/messages", json=given)


async def message(server: Running, **body: Any) -> Json:
    answer = await ask(server, **body)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def events_of(answer: httpx.Response) -> list[Json]:
    """The events of a stream, each with its type as its name; pings are left out."""
    assert answer.status_code == 200, answer.text
    found = []
    for part in answer.text.split("\n\n"):
        if part:
            first, second = part.split("\n")
            event = json.loads(second.removeprefix("data: "))
            assert first == f"event: {event['type']}"
            found.append(event)
    return [event for event in found if event["type"] != "ping"]


def collected(events: list[Json]) -> Json:
    """The message of a stream, put together as Anthropic's clients do."""
    first, *others = events
    assert first["type"] == "message_start"
    found: Json = first["message"]
    assert found["content"] == []
    arguments = ""
    for event in others[:-1]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(found["content"])
                found["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                block, delta = found["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        arguments += delta["partial_json"]
            case "content_block_stop":
                block = found["content"][event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = json.loads(arguments)
            case "message_delta":
                found |= event["delta"]
                found["usage"] |= event["usage"]
    assert others[-1] == {"type": "message_stop"}
    return found
