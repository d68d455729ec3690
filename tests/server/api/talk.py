"""What the tests of kept sessions say to a server, over HTTP and over sockets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection

from benchmarks import sse
from server.engine.types import EngineStats
from tests.fakes import STORY
from tests.server.harness import Running, receive, receive_until, send

Message = dict[str, Any]


def usage_of(num_prompt: int, num_generated: int, num_cached: int = 0) -> dict[str, Any]:
    """OpenAI's ``usage`` of a whole answer."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def field_of(param: str | None) -> str | None:
    """The field of a body that a ``param`` is in: that of ``messages[0].content`` is messages."""
    return param and re.split(r"[.\[]", param, maxsplit=1)[0]


def story(start: int, length: int, seed: int = 0) -> str:
    """What the fake engine writes from position ``start`` on."""
    return bytes(STORY[(seed * 7 + start + i) % len(STORY)] for i in range(length)).decode()


async def settled(server: Running) -> EngineStats:
    """The counts after the step that obeys what has been told: the first answer waits for it."""
    await server.stats()
    return await server.stats()


async def until(server: Running, holds: Callable[[EngineStats], bool]) -> EngineStats:
    """The engine's counts as soon as ``holds`` of them."""
    async with asyncio.timeout(60):
        while not holds(stats := await server.stats()):
            pass
    return stats


async def at_rest(server: Running) -> None:
    """Returns when nothing runs or waits for its turn."""
    await until(server, lambda stats: not stats.num_running and not stats.num_waiting)


async def create(server: Running) -> str:
    session: str = (await server.http.post("/v1/sessions")).json()["session"]
    return session


async def kept(server: Running, max_tokens: int = 5, **more: Any) -> str:
    """A session that has been told ``hi`` and has gone on from there."""
    body = {"prompt": "hi", "max_tokens": max_tokens, "seed": 0, "keep": True}
    session: str = (await server.generate(**{**body, **more})).json()["session"]
    return session


async def post(server: Running, session: str, verb: str, **body: Any) -> httpx.Response:
    return await server.http.post(f"/v1/sessions/{session}/{verb}", json=body)


async def info(server: Running, session: str) -> Message:
    found: Message = (await server.http.get(f"/v1/sessions/{session}")).json()
    return found


async def left(server: Running, max_tokens: int = 10**6) -> str:
    """A session whose client has begun a generation on it and gone."""
    session = await create(server)
    async with server.socket() as socket:
        await send(
            socket,
            type="generate",
            request_id="left",
            session=session,
            prompt="hi",
            max_tokens=max_tokens,
            seed=0,
        )
        await receive_until(socket, "token")
    await server.async_engine.drained()
    return session


async def resume(
    socket: ClientConnection, session: str, last_seq: int = 0, **more: Any
) -> list[Message]:
    """Resumes under the name ``r``; the answer, and the events to the end of what runs."""
    await send(
        socket,
        type="resume",
        **{"request_id": "r", "session": session, "last_seq": last_seq, **more},
    )
    messages = [await receive(socket)]
    if messages[0]["type"] not in ("resumed", "reset"):
        return messages
    if messages[0]["busy"]:
        return messages + await receive_until(socket, "finished")
    while messages[-1].get("seq", 0) < messages[0]["last_seq"]:
        messages.append(await receive(socket))
    return messages


def values_of(response: httpx.Response) -> list[Any]:
    """The values of a stream that ends as OpenAI's do."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8", response.text
    return sse.values_of(response.text, done=True)


def sse_of(response: httpx.Response) -> list[tuple[str | None, Message]]:
    """The events of a stream: their ids, and their values."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8", response.text
    events = sse.events_of(response.text)
    return [(event.id, event.value) for event in events if event.data != sse.DONE]
