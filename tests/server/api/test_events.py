"""A session's events over HTTP: read again from any of them, and followed to the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import httpx
import pytest

from benchmarks import sse
from server.store.base import StoreError, StoreFailed, StoreFull
from tests.fakes import FakeEngine
from tests.server.api.talk import (
    Message,
    at_rest,
    create,
    info,
    kept,
    left,
    post,
    sse_of,
    story,
)
from tests.server.failing_store import FailingStore
from tests.server.harness import Gate, Running, receive_until, running, send
from tests.waiting import eventually


async def events(
    server: Running, session: str, last_id: str = "", **query: object
) -> httpx.Response:
    headers = {"last-event-id": last_id} if last_id else {}
    params = {name: str(value) for name, value in query.items()}
    return await server.http.get(f"/v1/sessions/{session}/events", params=params, headers=headers)


async def follow(
    server: Running, session: str, when_live: Callable[[], Awaitable[None]], last_id: str = ""
) -> list[Message]:
    """The events of a session that runs; calls ``when_live`` at the first that was not missed."""
    found: list[Message] = []
    url, headers = f"/v1/sessions/{session}/events", {"last-event-id": last_id} if last_id else {}
    async with server.http.stream("GET", url, headers=headers) as response:
        async for event in sse.read(response.aiter_bytes()):
            found.append(event.value)
            if found[-1].get("seq") == found[0]["last_seq"] + 1:
                await when_live()
    return found


def seqs(response: httpx.Response) -> list[int]:
    return [event["seq"] for _, event in sse_of(response)[1:]]


async def test_events_begin_with_resumed_and_have_ids_of_epoch_and_seq(server: Running) -> None:
    session = await kept(server, 3)
    epoch = server.async_engine.epoch_name(0)
    (id, first), *rest = sse_of(await events(server, session))
    assert id == f"{epoch}:0"
    request_id = first.pop("request_id")
    assert first == {
        "type": "resumed",
        "session": session,
        "epoch": epoch,
        "seq": 0,
        "last_seq": 4,
        "position": 5,
        "busy": False,
    }
    assert [id for id, _ in rest] == [f"{epoch}:{seq}" for seq in (1, 2, 3, 4)]
    assert {event["request_id"] for _, event in rest} == {request_id}
    assert [event["type"] for _, event in rest] == [*["token"] * 3, "finished"]
    assert "".join(event["text"] for _, event in rest) == story(2, 3)


async def test_reader_continues_after_any_event_by_header_or_query(server: Running) -> None:
    session, epoch = await kept(server, 3), server.async_engine.epoch_name(0)
    assert seqs(await events(server, session, starting_after=4)) == []
    for last_seq in range(4):
        wanted = list(range(last_seq + 1, 5))
        assert seqs(await events(server, session, f"{epoch}:{last_seq}")) == wanted
        assert seqs(await events(server, session, str(last_seq))) == wanted
        assert seqs(await events(server, session, starting_after=last_seq)) == wanted


async def test_header_takes_precedence_over_the_query(server: Running) -> None:
    session = await kept(server, 3)
    assert seqs(await events(server, session, "3", starting_after=1)) == [4]


async def test_event_ids_resume_a_broken_stream(server: Running) -> None:
    body = {"prompt": "hi", "max_tokens": 6, "seed": 0, "keep": True, "stream": True}
    (no_id, opening), *chunks = sse_of(await server.http.post("/v1/completions", json=body))
    assert no_id is None
    assert opening["choices"][0]["text"] == ""
    assert opening["choices"][0]["finish_reason"] is None
    session = opening["session"]
    assert session is not None
    for broken_at in range(6):
        last_id = chunks[broken_at][0]
        assert last_id is not None
        rest = sse_of(await events(server, session, last_id))[1:]
        assert [id for id, _ in rest] == [id for id, _ in chunks[broken_at + 1 :]]
        texts = [chunk["choices"][0]["text"] for _, chunk in chunks[: broken_at + 1]]
        assert "".join([*texts, *(event["text"] for _, event in rest)]) == story(2, 6)


async def event_source(server: Running, url: str) -> tuple[list[Message], list[int]]:
    """What a browser's `EventSource` gets, which comes back until it is told not to.

    https://html.spec.whatwg.org/multipage/server-sent-events.html#sse-processing-model
    """
    found: list[Message] = []
    statuses, last_id = [], ""
    while len(statuses) < 5 and statuses[-1:] in ([], [200]):
        headers = {"accept": "text/event-stream", "cache-control": "no-store"}
        if last_id:
            headers["last-event-id"] = last_id
        answer = await server.http.get(url, headers=headers)
        statuses.append(answer.status_code)
        for event in sse.events_of(answer.text):
            found.append(event.value)
            last_id = event.id or last_id
    return found, statuses


@pytest.mark.parametrize("path", ["/events", "/events?starting_after=4", "/events?epoch=old-0"])
async def test_event_source_stops_at_the_end(server: Running, path: str) -> None:
    session = await kept(server, 3)
    found, statuses = await event_source(server, f"/v1/sessions/{session}{path}")
    assert statuses == [200, 204]
    wanted = [*["token"] * 3, "finished"] if path == "/events" else []
    assert [event["type"] for event in found[1:]] == wanted


@pytest.mark.process  # a template is rendered
async def test_event_source_of_a_response_stops_at_the_end(server: Running) -> None:
    body = {"input": "hi", "max_output_tokens": 3, "seed": 0}
    response = (await server.http.post("/v1/responses", json=body)).json()
    found, statuses = await event_source(server, f"/v1/responses/{response['id']}?stream=true")
    assert statuses == [200, 204]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[-1]["type"] == "response.incomplete"


@pytest.mark.process
async def test_response_continues_after_the_last_id(server: Running) -> None:
    body = {"input": "hi", "max_output_tokens": 3, "seed": 0, "stream": True}
    answer = await server.http.post("/v1/responses", json=body)
    whole = sse_of(answer)
    url = f"/v1/responses/{whole[0][1]['response']['id']}?stream=true"
    for number in (0, 4, len(whole) - 2):
        again = await server.http.get(url, headers={"last-event-id": str(number)})
        assert sse_of(again) == whole[number + 1 :]
    refused = await server.http.get(url, headers={"last-event-id": "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_events_of_a_running_session_are_streamed_to_its_end(server: Running) -> None:
    session = await left(server, 2000)
    found = sse_of(await events(server, session))
    assert [event["seq"] for _, event in found[1:]] == list(range(1, 2002))
    assert found[-1][1]["finish_reason"] == "length"


async def test_disconnect_detaches_and_the_session_continues(server: Running) -> None:
    session = await left(server, 3000)
    url = f"/v1/sessions/{session}/events"
    async with server.http.stream("GET", url, params={"starting_after": "0"}) as response:
        await anext(response.aiter_lines())
    await server.async_engine.drained()
    await at_rest(server)
    assert (await info(server, session))["seq"] == 3001
    assert len(seqs(await events(server, session))) == 3001


async def test_second_reader_is_a_409_unless_it_takes_over(server: Running) -> None:
    session = await create(server)
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="a", session=session, prompt="hi",
                   max_tokens=10**6)  # fmt: skip
        await receive_until(socket, "token")
        refused = await events(server, session)
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "session_attached"
        url = f"/v1/sessions/{session}/events?take_over=true"
        async with server.http.stream("GET", url) as response:
            assert response.status_code == 200
            error = (await receive_until(socket, "error"))[-1]
            assert error["error"]["code"] == "session_attached"
    await server.http.delete(f"/v1/sessions/{session}")


async def test_cursor_of_another_epoch_or_from_the_future_is_a_reset(server: Running) -> None:
    session = await kept(server, 3)
    epoch = server.async_engine.epoch_name(0)
    for answer in (
        await events(server, session, "5"),
        await events(server, session, f"{epoch[:-1]}9:2"),
        await events(server, session, starting_after=2, epoch="another-0"),
    ):
        ((_, first),) = sse_of(answer)
        assert (first["type"], first["seq"], first["busy"]) == ("reset", 4, False)
        assert first["reason"]


async def test_deleted_session_ends_its_reader_with_cancelled(server: Running) -> None:
    session = await left(server)

    async def delete() -> None:
        await server.http.delete(f"/v1/sessions/{session}")

    found = await follow(server, session, delete)
    assert found[-1]["finish_reason"] == "cancelled"
    missing = await events(server, session)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")


async def test_cancel_ends_a_detached_request(server: Running) -> None:
    session = await left(server)
    answer = await post(server, session, "cancel")
    assert answer.status_code == 200
    assert answer.json()["session"] == session
    found = await info(server, session)
    assert not found["busy"]
    last = sse_of(await events(server, session))[-1][1]
    assert (last["finish_reason"], last["seq"]) == ("cancelled", found["seq"])
    idle = await post(server, session, "cancel")
    assert (idle.status_code, idle.json()["busy"]) == (200, False)


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [(StoreFull("no room"), 507, "30"), (StoreFailed("a write failed"), 503, "2")],
)
async def test_failing_store_ends_a_reader_with_the_error(
    error: StoreError, status: int, retry_after: str
) -> None:
    store = FailingStore()
    async with running(store=store) as server:
        session = await left(server)

        async def fail() -> None:
            store.error = error

        last = (await follow(server, session, fail))[-1]
        assert (last["type"], last["status"]) == ("error", status)
        assert last["error"]["code"] == error.code
        refused = await server.generate(prompt="hi", keep=True)
        assert (refused.status_code, refused.headers["retry-after"]) == (status, retry_after)
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.generate(prompt="hi", max_tokens=5)).status_code == 200


async def test_death_of_the_engine_is_the_last_event() -> None:
    async with running() as server:
        session = await left(server)

        async def crash() -> None:
            await server.generate(prompt="<crash>")

        last = (await follow(server, session, crash))[-1]
    assert (last["type"], last["error"]["code"]) == ("error", "internal_error")


async def test_full_store_can_still_be_read() -> None:
    store = FailingStore()
    async with running(store=store) as server:
        session = await left(server)
        store.error = StoreFull("no room")
        await at_rest(server)
        (_, resumed), *found, (_, last) = sse_of(await events(server, session))
        assert [event["seq"] for _, event in found] == list(range(1, resumed["last_seq"] + 1))
        assert (last["type"], last["status"]) == ("error", 507)


async def test_drain_migrates_the_readers_of_sessions_that_a_store_keeps() -> None:
    gate = Gate()
    store = FailingStore(durable=True)
    async with running(FakeEngine(before_step=gate), store=store) as server:
        session = await create(server)
        async with server.socket() as socket:
            await send(socket, type="generate", request_id="a", session=session, prompt="hi",
                       max_tokens=10**6, seed=0)  # fmt: skip
            gate.allow(4)
            for _ in range(4):
                await receive_until(socket, "token")
            server.server.stop()
            gate.open()
            messages = await receive_until(socket, "migrate")
            migrate = messages[-1]
            await socket.wait_closed()
            assert socket.close_code == 1012
        (listed,) = store.list(None, None, 9)
        assert migrate == {
            "type": "migrate",
            "request_id": "a",
            "session": session,
            "epoch": server.async_engine.epoch_name(0),
            "seq": listed.seq,
            "position": listed.length,
        }
    async with running(store=store) as server:

        async def cancel() -> None:
            await post(server, session, "cancel")

        last_id = f"{migrate['epoch']}:{migrate['seq']}"
        resumed, *rest = await follow(server, session, cancel, last_id)
        assert (resumed["type"], resumed["last_seq"]) == ("resumed", migrate["seq"])
        assert [event["seq"] for event in rest] == [
            migrate["seq"] + 1 + i for i in range(len(rest))
        ]
        assert rest[-1]["finish_reason"] == "cancelled"


class Steps:
    """Holds an engine before each step; `one` lets it take one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._allowed = threading.Semaphore(0)
        self._open = False
        self.reached = asyncio.Event()

    def __call__(self) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        if not self._open:
            self._allowed.acquire()

    async def one(self) -> None:
        """Returns when the engine stands before the next one."""
        self.reached.clear()
        self._allowed.release()
        await self.reached.wait()

    def all(self) -> None:
        self._open = True
        self._allowed.release()


async def test_reader_that_takes_over_a_prompt_that_is_scored_gets_what_is_generated() -> None:
    """Its scores are an event of their own, and not the last one."""
    steps = Steps()
    async with running(FakeEngine(before_step=steps)) as server:
        session = await create(server)
        body = {"prompt": "a" * 30_000, "max_tokens": 5, "session": session, "seed": 1}
        body |= {"echo": True, "logprobs": 1, "ignore_eos": True}
        first = asyncio.create_task(server.generate(**body))
        await steps.reached.wait()
        second = asyncio.create_task(events(server, session, take_over="true"))
        await eventually(lambda: len(server.server.server_state.tasks) == 2)
        while not first.done():  # the prompt is fed in some hundred steps
            step = asyncio.create_task(steps.one())
            await asyncio.wait({step, first}, return_when=asyncio.FIRST_COMPLETED)
        steps.all()
        found = [event for _, event in sse_of(await second)]
    assert (await first).json()["error"]["code"] == "session_attached"
    assert [event["type"] for event in found] == ["resumed", *["token"] * 5, "finished"]
