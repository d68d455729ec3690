"""Work that comes twice under one idempotency key is done once, and answered twice."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.api.talk import create, info, left, post, sse_of, story
from tests.server.failing_store import FailingStore
from tests.server.harness import Running, receive, receive_until, running, send

GENERATE = {"prompt": "hi", "max_tokens": 6, "seed": 0, "keep": True, "idempotency_key": "k"}


def same(one: httpx.Response, other: httpx.Response, *own: str) -> bool:
    """Whether two answers say the same, but for the fields named."""
    answers = [{n: v for n, v in each.json().items() if n not in own} for each in (one, other)]
    return answers[0] == answers[1]


async def test_completion_under_a_key_is_generated_once(server: Running) -> None:
    first, again = await server.generate(**GENERATE), await server.generate(**GENERATE)
    assert first.status_code == again.status_code == 200
    assert same(first, again, "id", "created")
    assert first.json()["choices"][0]["text"] == story(2, 6)
    stats = await server.stats()
    assert (stats.completion_tokens_total, stats.num_sessions) == (6, 1)


async def test_stream_under_a_key_is_the_same_stream(server: Running) -> None:
    first = sse_of(await server.generate(**GENERATE, stream=True))
    again = sse_of(await server.generate(**GENERATE, stream=True))
    for (id, chunk), (other_id, other) in zip(first, again, strict=True):
        assert id == other_id
        for name in ("choices", "session", "position", "seed"):
            assert chunk[name] == other[name]
    whole = await server.generate(**GENERATE)
    texts = [chunk["choices"][0]["text"] for _, chunk in first]
    assert whole.json()["choices"][0]["text"] == "".join(texts)


async def test_work_under_a_key_is_repeated_without_later_events(server: Running) -> None:
    first = await server.generate(**GENERATE)
    session = first.json()["session"]
    await server.generate(session=session, max_tokens=3)
    assert same(first, await server.generate(**GENERATE), "id", "created")
    async with server.socket() as socket:
        message = {name: GENERATE[name] for name in GENERATE}
        await send(socket, type="generate", request_id="a", **message)
        resumed, *events = await receive_until(socket, "finished")
        assert (resumed["type"], resumed["seq"], resumed["last_seq"]) == ("resumed", 0, 7)
        assert [event["seq"] for event in events] == list(range(1, 8))
        await send(socket, type="create", request_id="a")
        assert (await receive(socket))["type"] == "created"


async def test_appended_text_under_a_key_is_fed_once(server: Running) -> None:
    session = await create(server)
    body = {"text": "abc", "logprobs": True, "idempotency_key": "k"}
    first, again = [await post(server, session, "append", **body) for _ in range(2)]
    assert same(first, again)
    assert first.json()["position"] == 3
    async with server.socket() as socket:
        await send(socket, type="append", request_id="a", session=session, **body)
        answer = await receive(socket)
    assert (answer["type"], answer["request_id"], answer["position"]) == ("appended", "a", 3)
    assert answer["logprobs"] == first.json()["logprobs"]
    assert (await info(server, session))["position"] == 3


async def test_second_concurrent_request_with_a_key_is_refused() -> None:
    store = FailingStore()
    async with running(store=store) as server:
        store.hold()
        first = asyncio.create_task(server.generate(**GENERATE))
        assert await asyncio.to_thread(store.held.wait, 60)
        second = await server.generate(**GENERATE)
        assert (second.status_code, second.json()["error"]["code"]) == (409, "key_in_use")
        assert second.json()["error"]["param"] == "idempotency_key"
        assert second.headers["retry-after"] == "1"
        store.unblock()
        assert (await first).status_code == 200
        assert same(await first, await server.generate(**GENERATE), "id", "created")
        assert (await server.stats()).completion_tokens_total == 6


async def test_concurrent_appends_with_a_key_feed_once(server: Running) -> None:
    session = await create(server)
    body = {"text": "abc", "idempotency_key": "k"}
    answers = await asyncio.gather(*(post(server, session, "append", **body) for _ in range(20)))
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert 200 in {answer.status_code for answer in answers}
    codes = {answer.json()["error"]["code"] for answer in answers if answer.status_code == 409}
    assert codes <= {"key_in_use"}
    assert (await info(server, session))["position"] == 3


async def test_new_socket_finds_the_work_that_the_old_one_began(server: Running) -> None:
    session = await create(server)
    message: dict[str, Any] = {
        "type": "generate",
        "request_id": "a",
        "session": session,
        "prompt": "hi",
        "max_tokens": 3000,
        "seed": 0,
        "idempotency_key": "k",
    }
    async with server.socket() as socket:
        await send(socket, **message)
        await receive_until(socket, "token")
        socket.transport.abort()
    await server.async_engine.drained()
    async with server.socket() as socket:
        await send(socket, **message)
        resumed, *events = await receive_until(socket, "finished")
    assert resumed["type"] == "resumed"
    assert [event["seq"] for event in events] == list(range(1, 3002))
    assert "".join(event["text"] for event in events) == story(2, 3000)
    assert (await server.stats()).completion_tokens_total == 3000


async def test_running_work_of_another_reader_is_not_taken_from_it(server: Running) -> None:
    async with server.socket() as socket:
        body = {**GENERATE, "max_tokens": 10**6}
        await send(socket, type="generate", request_id="a", **body)
        await receive_until(socket, "token")
        again = await server.generate(**body)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "session_attached")
        await send(socket, type="cancel", request_id="a")
        await receive_until(socket, "finished")
        done = await server.generate(**body)
        assert done.json()["choices"][0]["finish_reason"] == "cancelled"


async def test_detached_request_is_streamed_to_its_end_over_http(server: Running) -> None:
    session = await create(server)
    body = {"prompt": "hi", "session": session, "max_tokens": 5000, "seed": 0, "stream": True}
    body["idempotency_key"] = "k"
    async with server.http.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_lines())
    await server.async_engine.drained()
    chunks = sse_of(await server.http.post("/v1/completions", json=body))
    texts = [chunk["choices"][0]["text"] for _, chunk in chunks]
    assert "".join(texts) == story(2, 5000)
    assert len(chunks) == 5002


async def test_keys_of_different_owners_are_independent() -> None:
    async with running(api_keys=("one", "two")) as server:
        sessions = set()
        for key in ("one", "two"):
            server.http.headers["authorization"] = f"Bearer {key}"
            sessions.add((await server.generate(**GENERATE)).json()["session"])
        assert len(sessions) == 2


async def test_refused_work_leaves_its_key_free(server: Running) -> None:
    refused = await server.generate(**{**GENERATE, "session": "sess_none"})
    assert refused.status_code == 404
    assert (await server.generate(**GENERATE)).status_code == 200


async def test_work_of_a_deleted_session_is_not_done_again(server: Running) -> None:
    session = (await server.generate(**GENERATE)).json()["session"]
    await server.http.delete(f"/v1/sessions/{session}")
    assert (await server.generate(**GENERATE)).status_code == 404
    assert (await server.stats()).completion_tokens_total == 6


async def test_busy_session_refuses_other_work_under_a_key(server: Running) -> None:
    session = await left(server)
    answer = await post(server, session, "append", text="a", idempotency_key="k")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
    await post(server, session, "cancel")
    again = await post(server, session, "append", text="a", idempotency_key="k")
    assert again.status_code == 200


ROUTES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
}


@pytest.mark.process
@pytest.mark.parametrize("path", ROUTES)
async def test_header_is_a_key_that_needs_no_other_field(server: Running, path: str) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body, headers = ROUTES[path] | {limit: 16}, {"Idempotency-Key": "k"}
    first, again = [await server.http.post(path, json=body, headers=headers) for _ in range(2)]
    assert first.status_code == again.status_code == 200, first.text
    own = ("id", "created", "created_at")
    assert same(first, again, *own)
    stats = await server.stats()
    assert (stats.completion_tokens_total, stats.num_sessions) == (16, 1)


@pytest.mark.parametrize("key", ["", "k" * 129, "a\tb"])
async def test_header_that_cannot_be_a_key_is_refused(server: Running, key: str) -> None:
    answer = await server.http.post(
        "/v1/completions", json={"prompt": "hi"}, headers={"Idempotency-Key": key}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_two_keys_of_one_request_are_refused(server: Running) -> None:
    answer = await server.http.post(
        "/v1/completions", json=GENERATE, headers={"Idempotency-Key": "other"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "idempotency_key")


async def test_seed_of_a_key_is_the_same_where_the_log_is_lost() -> None:
    """Another server, which has never heard of it, comes to the same text."""
    seeds = []
    for _ in range(2):
        async with running() as server:
            headers = {"Idempotency-Key": "k"}
            body = {"prompt": "hi", "max_tokens": 4}
            answer = await server.http.post("/v1/completions", json=body, headers=headers)
            seeds.append(answer.json()["seed"])
    assert seeds[0] == seeds[1]
