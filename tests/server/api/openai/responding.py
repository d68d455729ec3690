"""What the tests of responses say to a server, and hear."""

from __future__ import annotations

import json
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

from benchmarks import sse
from tests.reliability.servers import socket_to
from tests.server.harness import Running

Json = dict[str, Any]

ASKED = {"input": "hi", "max_output_tokens": 6, "seed": 0}
#: What a chat template makes of a question before the answer: it is one token for each letter.
PROMPT = "hi\n\n"


async def ask(server: Running, **body: Any) -> httpx.Response:
    return await server.http.post("/v1/responses", json={**ASKED, **body})


async def asked(server: Running, **body: Any) -> Json:
    """The response, which must be one."""
    answer = await ask(server, **body)
    assert answer.status_code == 200, answer.text
    response: Json = answer.json()
    return response


async def get(server: Running, id: str, path: str = "", **query: Any) -> httpx.Response:
    return await server.http.get(f"/v1/responses/{id}{path}", params=query)


async def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def events_of(answer: httpx.Response) -> list[Json]:
    """Of a stream; the name of each is that in its data."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8", answer.text
    events = []
    for event in sse.events_of(answer.text):
        assert event.name == event.value["type"]
        events.append(event.value)
    return events


def text_of(response: Json) -> str:
    """Of all messages."""
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def streamed_text(events: list[Json]) -> str:
    deltas = (e["delta"] for e in events if e["type"] == "response.output_text.delta")
    return "".join(deltas)


def socket_of(server: Running) -> connect:
    return socket_to(f"ws://127.0.0.1:{server.port}/v1/responses")


async def create(socket: ClientConnection, **body: Any) -> None:
    await socket.send(json.dumps({"type": "response.create", **ASKED, **body}))


async def until_end(socket: ClientConnection) -> list[Json]:
    """The events up to one that ends a response, or an error."""
    ends = ("response.completed", "response.incomplete", "response.failed", "error")
    events: list[Json] = [json.loads(await socket.recv())]
    while events[-1]["type"] not in ends:
        events.append(json.loads(await socket.recv()))
    return events
