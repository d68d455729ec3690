"""HTTP, server-sent events and sockets through Ray's proxy are what they are without it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from benchmarks.sse import values_of
from tests.reliability.servers import STUCK_S
from tests.reliability.streams import answer, answer_of, ask, client_of, socket_of
from tests.server.cluster.ray.clusters import HANGS_S, HEADERS, KEY, REPLICA, OnRay
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(HANGS_S)

PROMPT = "Who lives in the hollow tree?"
BODY: dict[str, Any] = {"prompt": PROMPT, "seed": 5, "temperature": 0.9, "ignore_eos": True}
ENDLESS = {**BODY, "max_tokens": 10**6}
SESSION = "sess_" + "5e" * 16


@asynccontextmanager
async def client(on_ray: OnRay) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(on_ray.url) as made:
        made.headers.update(HEADERS)
        yield made


async def running(on_ray: OnRay, session: str) -> float:
    """How many streams run at the replica that ``session`` leads to."""
    async with client(on_ray) as http:
        text = (await http.get("/metrics", params={"session": session})).text
    (family,) = [
        family
        for family in text_string_to_metric_families(text)
        if family.name == "everstream_running_requests"
    ]
    return sum(sample.value for sample in family.samples)


async def until_running(on_ray: OnRay, session: str, number: int) -> None:
    async def is_running() -> bool:
        return await running(on_ray, session) == number

    await eventually(is_running)


async def test_answer_and_stream_have_the_same_text(on_ray: OnRay) -> None:
    body = {**BODY, "max_tokens": 50}
    async with client(on_ray) as http:
        whole = (await http.post("/v1/completions", json=body)).json()
        streamed = await http.post("/v1/completions", json={**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")
    chunks = values_of(streamed.text, done=True)
    assert len(chunks) == 51, "one event for each token, and the end"
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole["choices"][0]["text"]


async def test_tokens_come_while_the_stream_runs_and_a_client_that_leaves_ends_it(
    on_ray: OnRay,
) -> None:
    params = {"session": SESSION}
    async with (
        client(on_ray) as http,
        http.stream(
            "POST", "/v1/completions", json={**ENDLESS, "stream": True}, params=params
        ) as response,
    ):
        text, pieces = "", response.aiter_text()  # to released them would be to leave
        while text.count("\n\n") < 20:
            text += await anext(pieces)
        await until_running(on_ray, SESSION, 1)
    await until_running(on_ray, SESSION, 0)


async def test_client_that_waits_for_json_and_leaves_ends_it(on_ray: OnRay) -> None:
    async def asking() -> None:
        async with client(on_ray) as http:
            await http.post("/v1/completions", json=ENDLESS, params={"session": SESSION})

    task = asyncio.create_task(asking())
    await until_running(on_ray, SESSION, 1)
    task.cancel()
    await until_running(on_ray, SESSION, 0)


async def test_socket_carries_many_streams_and_frees_all_when_it_closes(on_ray: OnRay) -> None:
    url = f"{on_ray.stream_url}?session={SESSION}"
    async with socket_of(url, **HEADERS) as socket:
        for name in "ab":
            await ask(socket, type="generate", request_id=name, **ENDLESS)
        seqs: dict[str, list[int]] = {"a": [], "b": []}
        while min(map(len, seqs.values())) < 50:
            frame = await answer(socket)
            if frame["type"] == "token":
                seqs[frame["request_id"]].append(frame["seq"])
        for seen in seqs.values():
            assert seen == list(range(1, len(seen) + 1))
        await ask(socket, type="cancel", request_id="a")
        assert (await answer_of(socket, "finished"))["finish_reason"] == "cancelled"
        await until_running(on_ray, SESSION, 1)
    await until_running(on_ray, SESSION, 0)


async def test_errors_are_ours(on_ray: OnRay) -> None:
    async with client(on_ray) as http:
        bad = await http.post("/v1/completions", json={**BODY, "temperature": -1})
        lost = await http.get("/v1/nowhere")
        wrong = await http.get("/v1/completions")
        large = await http.post("/v1/completions", json={"prompt": "a" * (2 << 20)})
        unknown = await http.get(f"/v1/sessions/{SESSION}")
    codes = [(each.status_code, each.json()["error"]["code"]) for each in (bad, lost, wrong, large)]
    assert codes == [
        (400, "invalid_value"),
        (404, "not_found"),
        (405, "method_not_allowed"),
        (413, "body_too_large"),
    ]
    assert unknown.json()["error"]["code"] == "session_not_found"
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/sessions", "/nowhere"])
async def test_key_is_wanted(on_ray: OnRay, path: str) -> None:
    async with client_of(on_ray.url) as http:
        refused = await http.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await http.get("/health")).status_code == 200
        wrong = await http.get(path, headers={"Authorization": f"Bearer {KEY}x"})
        assert wrong.status_code == 401


async def test_key_is_wanted_of_a_socket(on_ray: OnRay) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with socket_of(on_ray.stream_url):
            pass
    assert refused.value.response.status_code == 401
    async with connect(on_ray.stream_url, subprotocols=["everstream.v1"]) as socket:  # type: ignore[list-item]
        await socket.wait_closed()
        assert socket.close_code == 1008


async def test_too_large_a_message_closes_its_socket(on_ray: OnRay) -> None:
    async with socket_of(on_ray.stream_url, **HEADERS) as socket:
        await socket.send(json.dumps({"type": "create", "request_id": "a" * (2 << 20)}))
        with pytest.raises(ConnectionClosed) as closed:
            await until_closed(socket)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


async def until_closed(socket: ClientConnection) -> None:
    async with asyncio.timeout(STUCK_S):
        while True:
            await socket.recv()


# Which replica


async def replica_for(on_ray: OnRay, path: str, **more: Any) -> str:
    async with client(on_ray) as http:
        response = await http.get(path, **more)
    replica: str = response.headers[REPLICA]
    return replica


async def test_requests_of_a_session_go_to_one_replica(on_ray: OnRay) -> None:
    for number in range(4):
        session = f"sess_{number:032x}"
        replicas = {
            await replica_for(on_ray, f"/v1/sessions/{session}"),
            await replica_for(on_ray, f"/v1/sessions/{session}/events"),
            await replica_for(on_ray, "/v1/models", params={"session": session}),
            await replica_for(on_ray, "/v1/models", headers={"X-Session-Id": session}),
            await replica_of_socket(on_ray, session),
        }
        assert len(replicas) == 1, session


async def test_sessions_are_spread_over_the_replicas(on_ray: OnRay) -> None:
    paths = [f"/v1/sessions/sess_{number:032x}" for number in range(48)]
    async with client(on_ray) as http:
        replicas = {(await http.get(path)).headers[REPLICA] for path in paths}
    assert len(replicas) == 2


async def replica_of_socket(on_ray: OnRay, session: str) -> str:
    async with socket_of(f"{on_ray.stream_url}?session={session}", **HEADERS) as socket:
        assert socket.response is not None
        return socket.response.headers[REPLICA]


async def test_session_is_found_where_it_was_made(on_ray: OnRay) -> None:
    """Their store is each replica's own memory, so that no other would have it."""
    makers = set()
    async with client(on_ray) as http:
        for _ in range(64):
            made = await http.post("/v1/sessions")
            session = made.json()["session"]
            found = await http.get(f"/v1/sessions/{session}")
            assert (found.status_code, found.json()["session"]) == (200, session)
            assert found.headers[REPLICA] == made.headers[REPLICA]
            makers.add(made.headers[REPLICA])
    assert len(makers) == 2
