"""OpenAI's WebSocket mode at `/v1/responses`."""

from __future__ import annotations

import asyncio
import json

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.server.api.openai.responding import (
    PROMPT,
    ask,
    create,
    events_of,
    get,
    socket_of,
    streamed_text,
    text_of,
    until_end,
)
from tests.server.api.talk import at_rest, story
from tests.server.harness import Running, running

pytestmark = pytest.mark.process


async def test_events_are_those_of_a_stream(server: Running) -> None:
    async with socket_of(server) as socket:
        await create(socket)
        events = await until_end(socket)
    id = events[0]["response"]["id"]
    assert events_of(await get(server, id, stream="true")) == events
    assert streamed_text(events) == story(len(PROMPT), 6)


async def test_turns_follow_each_other_on_one_socket(server: Running) -> None:
    async with socket_of(server) as socket:
        await create(socket)
        first = (await until_end(socket))[-1]["response"]
        await create(socket, input="more", previous_response_id=first["id"])
        second = (await until_end(socket))[-1]["response"]
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == first["usage"]["total_tokens"]


async def test_turn_that_is_not_stored_can_be_followed_on_its_socket_alone(
    server: Running,
) -> None:
    async with socket_of(server) as socket:
        await create(socket, store=False)
        first = (await until_end(socket))[-1]["response"]
        ids, texts = [first["id"]], [text_of(first)]
        for _ in range(3):
            await create(socket, input="more", store=False, previous_response_id=ids[-1])
            response = (await until_end(socket))[-1]["response"]
            ids.append(response["id"])
            texts.append(text_of(response))
        told = "".join(f"{text.strip()}\n\nmore\n\n" for text in texts[:-1])
        assert response["usage"]["input_tokens"] == len(PROMPT + told)
    assert (await ask(server, previous_response_id=ids[-1])).status_code == 400
    assert (await server.stats()).num_sessions == 0


async def test_one_stream_runs_in_order_and_streams_run_concurrently(server: Running) -> None:
    async with socket_of(server) as socket:
        await create(socket, stream_id="long", max_output_tokens=10**6)
        assert json.loads(await socket.recv())["stream_id"] == "long"
        await create(socket, stream_id="long")
        await create(socket, stream_id="short")
        ended: list[str] = []
        while not ended:
            event = json.loads(await socket.recv())
            if event["type"] == "response.incomplete":
                ended.append(event["stream_id"])
        assert ended == ["short"]


async def test_errors_have_openais_shape(server: Running) -> None:
    async with socket_of(server) as socket:
        await create(socket, stream_id="s", previous_response_id="resp_none")
        (error,) = await until_end(socket)
        assert (error["type"], error["status"], error["stream_id"]) == ("error", 400, "s")
        assert error["error"]["code"] == "previous_response_not_found"
        assert error["error"]["param"] == "previous_response_id"
        assert error["error"]["type"] == "invalid_request_error"
        for frame, param in [
            ({"type": "response.steer"}, "type"),
            ({"type": "response.create", "input": "a", "background": True}, "background"),
            ({"type": "response.create", "input": "a", "stream": False}, "stream"),
            ({"type": "response.create", "input": "a", "generate": False}, "generate"),
            ({"type": "response.create", "input": "a", "nonsense": 1}, "nonsense"),
            ({"type": "response.create", "input": "a", "model": "none"}, "model"),
        ]:
            await socket.send(json.dumps(frame))
            (error,) = await until_end(socket)
            assert error["error"]["param"] == param, frame
        await socket.send("{")
        assert (await until_end(socket))[0]["status"] == 400
        await socket.send(b"{}")
        assert (await until_end(socket))[0]["status"] == 400
        await create(socket)
        assert (await until_end(socket))[-1]["type"] == "response.incomplete"


async def test_too_many_at_once_are_refused() -> None:
    async with running(max_socket_requests=2) as server, socket_of(server) as socket:
        for _ in range(3):
            await create(socket, max_output_tokens=10**6)
        async with asyncio.timeout(60):
            while (event := json.loads(await socket.recv()))["type"] != "error":
                pass
        assert (event["status"], event["error"]["code"]) == (429, "queue_full")


async def test_socket_that_closes_ends_its_responses(server: Running) -> None:
    async with socket_of(server) as socket:
        await create(socket, max_output_tokens=10**6)
        id = json.loads(await socket.recv())["response"]["id"]
    await at_rest(server)
    assert (await get(server, id)).json()["status"] == "cancelled"


async def test_drain_closes_with_1012_after_the_last_event() -> None:
    async with running() as server, socket_of(server) as socket:
        await create(socket)
        await until_end(socket)
        server.server.stop()
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012


async def test_message_that_is_too_large_closes_with_1009() -> None:
    async with running(max_message_bytes=4096) as server, socket_of(server) as socket:
        await create(socket, input="a" * 8192)
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_handshake_without_a_key_is_refused() -> None:
    async with running(api_keys=["a" * 32]) as server:
        with pytest.raises(InvalidStatus) as refused:
            async with socket_of(server):
                pass
        assert refused.value.response.status_code == 401
