"""Drain: on SIGTERM kept sessions are saved and move on, others end in peace, exit code 0."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

from websockets.asyncio.client import ClientConnection

from benchmarks import sse
from benchmarks.sse import SseEvent
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ServerProcess
from tests.reliability.soloist import check_alone
from tests.reliability.streams import (
    ENDLESS,
    PROMPT,
    SAMPLING,
    Frame,
    answer,
    answer_of,
    ask,
    client_of,
    events_over_http,
    kept_streams,
    log_of_store,
    run_all,
    socket_of,
    tiny_server,
)
from tests.waiting import eventually


def server_at(folder: Path, drain_timeout_s: float = 600) -> ServerProcess:
    return tiny_server(folder, "--drain-timeout", drain_timeout_s)


async def begin_unkept(socket: ClientConnection) -> None:
    """An endless generation that is not kept."""
    await ask(
        socket, type="generate", request_id="u", prompt=PROMPT, max_tokens=ENDLESS, **SAMPLING
    )
    assert (await answer(socket))["type"] == "started"


async def test_kept_streams_migrate_and_continue_without_a_gap(tmp_path: Path) -> None:
    history, odometer = History(), Odometer()
    streams = kept_streams(8, history, odometer, max_tokens=ENDLESS)
    with server_at(tmp_path) as server:
        reading = asyncio.create_task(run_all(streams, server.stream_url))
        await odometer.reach(400)
        assert await asyncio.to_thread(server.stop) == 0
        await reading
        for stream in streams:
            assert stream.ends == ["migrate"], stream.frames[-1]
            assert stream.close_code == 1012
            last = stream.frames[-1]
            assert last["request_id"] == stream.name
            assert (last["session"], last["epoch"]) == (stream.session, stream.epoch)
            # It stopped at the boundary of a token: nothing was made that was not sent.
            assert last["seq"] == stream.last_seq
            assert last["position"] == stream.frames[-2]["position"] + 1
        await asyncio.to_thread(server.start)
        await run_all(streams, server.stream_url, num_tokens=100)
        assert {stream.ends[-1] for stream in streams} == {"finished"}
        for stream in streams:
            (resumed,) = stream.resumed
            assert resumed["seq"] == resumed["last_seq"], "something was made and not sent"
        assert server.stop() == 0
    model = tmp_path / "model"
    check_alone(streams, history, log_of_store(tmp_path / "store", model), model)


async def test_unkept_stream_continues_and_new_requests_are_refused(tmp_path: Path) -> None:
    odometer = Odometer()
    (stream,) = kept_streams(1, History(), odometer, max_tokens=ENDLESS)
    with server_at(tmp_path) as server:
        async with AsyncExitStack() as stack:
            unkept, third = [
                await stack.enter_async_context(socket_of(server.stream_url)) for _ in range(2)
            ]
            await begin_unkept(unkept)
            reading = asyncio.create_task(stream.run(server.stream_url))
            await odometer.reach(10)
            stopping = asyncio.create_task(asyncio.to_thread(server.stop))
            await eventually(lambda: server.get("/ready")[0] == 503)
            assert server.get("/health")[0] == 200
            for keep in (True, False):
                await ask(third, type="generate", request_id="n", prompt=PROMPT, keep=keep)
                refused = await answer(third)
                assert (refused["status"], refused["error"]["code"]) == (503, "draining")
            # No other work is done any more, and all of its tokens come.
            for _ in range(3000):
                assert (await answer(unkept))["type"] == "token"
            await ask(unkept, type="cancel", request_id="u")
            assert (await answer_of(unkept, "finished"))["finish_reason"] == "cancelled"
            assert await stopping == 0
            assert await reading == "migrate"
            for socket in (unkept, third):
                await socket.wait_closed()
                assert socket.close_code == 1012


async def test_unkept_stream_is_cancelled_when_the_time_is_over(tmp_path: Path) -> None:
    with server_at(tmp_path, drain_timeout_s=0.5) as server:
        async with socket_of(server.stream_url) as unkept:
            await begin_unkept(unkept)
            stopping = asyncio.create_task(asyncio.to_thread(server.stop))
            assert (await answer_of(unkept, "finished"))["finish_reason"] == "cancelled"
            await unkept.wait_closed()
            assert unkept.close_code == 1012
            assert await stopping == 0


async def all_of(events: AsyncIterator[SseEvent]) -> list[SseEvent]:
    return [event async for event in events]


async def test_second_signal_cancels_unkept_requests_and_saves_the_others(tmp_path: Path) -> None:
    odometer = Odometer()
    (stream,) = kept_streams(1, History(), odometer, max_tokens=ENDLESS)
    with server_at(tmp_path) as server:
        async with socket_of(server.stream_url) as unkept, client_of(server.url) as client:
            await begin_unkept(unkept)
            reading = asyncio.create_task(stream.run(server.stream_url))
            await odometer.reach(10)
            body = {"prompt": PROMPT, "max_tokens": ENDLESS, "stream": True, **SAMPLING}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                # All the time: a client that does not read is dropped after a while.
                events = sse.read(response.aiter_bytes())
                await anext(events)
                reading_http = asyncio.create_task(all_of(events))
                os.kill(server.pid, signal.SIGTERM)
                await eventually(lambda: server.get("/ready")[0] == 503)
                os.kill(server.pid, signal.SIGTERM)
                over_http = await reading_http
            assert (await answer_of(unkept, "finished"))["finish_reason"] == "cancelled"
            assert over_http[-2].value["choices"][0]["finish_reason"] == "cancelled"
            await unkept.wait_closed()
            assert unkept.close_code == 1012
            assert await reading == "migrate"
            assert await asyncio.to_thread(server.wait) == 0
        assert "did not end its requests" not in server.log()


async def test_kept_stream_over_http_gives_its_cursor_and_resumes_from_it(
    tmp_path: Path,
) -> None:
    body = {"prompt": PROMPT, "max_tokens": ENDLESS, "seed": 4, "keep": True, "stream": True}
    with server_at(tmp_path) as server:
        answer_text, stopping = "", None
        async with (
            client_of(server.url) as client,
            client.stream("POST", "/v1/completions", json={**body, **SAMPLING}) as response,
        ):
            async for text in response.aiter_text():
                answer_text += text
                if stopping is None and answer_text.count("\n\n") > 100:
                    stopping = asyncio.create_task(asyncio.to_thread(server.stop))
        assert stopping is not None
        assert await stopping == 0
        *chunks, error = sse.values_of(answer_text, done=True)
        assert error["error"]["code"] == "migrated"
        last_id = re.findall("^id: (.*)$", answer_text, re.MULTILINE)[-1]
        last_seq = int(last_id.rpartition(":")[2])
        await asyncio.to_thread(server.start)
        resumed, *rest = await read_on(server, chunks[0]["session"], last_id)
        assert (resumed["type"], resumed["seq"]) == ("resumed", last_seq)
        assert [frame["seq"] for frame in rest] == [last_seq + 1 + n for n in range(len(rest))]
        assert rest[-1]["finish_reason"] == "cancelled"
        # What came by both ways is all that the log has.
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        text += "".join(frame["text"] for frame in rest)
        _, *told = await events_over_http(server.url, chunks[0]["session"])
        assert "".join(frame["text"] for frame in told) == text


async def read_on(server: ServerProcess, session: str, last_id: str) -> list[Frame]:
    """What comes after ``last_id``, until it is cancelled after some of it."""
    path = f"/v1/sessions/{session}"
    text, cancelling = "", None
    async with (
        client_of(server.url) as client,
        client.stream("GET", f"{path}/events", headers={"Last-Event-ID": last_id}) as response,
    ):
        async for piece in response.aiter_text():
            text += piece
            if cancelling is None and text.count("\n\n") > 100:
                cancelling = asyncio.create_task(client.post(f"{path}/cancel"))
        assert cancelling is not None, text
        assert (await cancelling).status_code == 200
    return sse.values_of(text)


async def test_idle_session_continues_after_a_drain(tmp_path: Path) -> None:
    first = {"prompt": PROMPT, "max_tokens": 70, "seed": 1, "keep": True, **SAMPLING}
    second = {"prompt": " And then", "max_tokens": 70, "seed": 2, **SAMPLING}
    answers = []
    for name, is_drained in (("a", True), ("b", False)):
        (tmp_path / name).mkdir()
        with server_at(tmp_path / name) as server:
            async with client_of(server.url) as client:
                begun = (await client.post("/v1/completions", json=first)).json()
            if is_drained:
                assert server.stop() == 0
                server.start()
            async with client_of(server.url) as client:
                body = {**second, "session": begun["session"]}
                more = (await client.post("/v1/completions", json=body)).json()
        answers.append((begun["choices"], more["choices"], more["position"]))
    assert answers[0] == answers[1]
