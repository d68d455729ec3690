"""9: the same work under the same key twice, also across a crash: it is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.websocket import text
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.raw_websocket import opened
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.reliability.streams import (
    ENDLESS,
    PROMPT,
    SAMPLING,
    Frame,
    KeptStream,
    answer_of,
    ask,
    client_of,
    events_of,
    events_over_http,
    kept_streams,
    run_all,
    socket_of,
    tiny_server,
)

LONG_TEXT = "Only the wind, said she, and he is not at home. " * 500


async def generated(url: str, key: str, max_tokens: int = 50) -> list[Frame]:
    """Everything that one more connection gets for the same work."""
    body = {"prompt": PROMPT, "max_tokens": max_tokens, **SAMPLING}
    stream = KeptStream(key, History(), seed=3, **body)
    await stream.run(url)
    return stream.frames


def new_session(server: ServerProcess) -> str:
    return str(posted(server, "/v1/sessions")["session"])


def posted(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.post(server.url + path, json=body, timeout=STUCK_S).json()
    return answer


def got(server: ServerProcess, path: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(server.url + path, timeout=STUCK_S).json()
    return answer


def num_sessions(server: ServerProcess) -> int:
    return len(got(server, "/v1/sessions")["data"])


async def test_generation_runs_once_and_repeats_return_its_events(
    tmp_path: Path,
) -> None:
    with tiny_server(tmp_path) as server:
        first = await generated(server.stream_url, "work")
        again = await generated(server.stream_url, "work")
        server.restart()
        after_crash = await generated(server.stream_url, "work")
        assert num_sessions(server) == 1
    assert [frames[0]["type"] for frames in (first, again, after_crash)] == [
        "started",
        "resumed",
        "resumed",
    ]
    assert len(events_of(first)) == 51
    assert events_of(first) == events_of(again)
    assert [frame["seq"] for frame in events_of(after_crash)] == list(range(1, 52))
    assert events_of(after_crash) == events_of(first)


async def test_two_at_the_same_moment_are_one_piece_of_work(tmp_path: Path) -> None:
    """The second is told to come again, or that the first has its events, or all of them."""
    with tiny_server(tmp_path) as server:
        both = await asyncio.gather(*(generated(server.stream_url, "work") for _ in range(2)))
        assert num_sessions(server) == 1
    whole = [frames for frames in both if frames[-1]["type"] == "finished"]
    refused = [frames[-1]["error"]["code"] for frames in both if frames not in whole]
    assert whole
    assert set(refused) <= {"key_in_use", "session_attached"}
    assert all(len(events_of(frames)) == 51 for frames in whole)


async def test_crash_before_the_answer_does_not_do_the_work_twice(tmp_path: Path) -> None:
    """The client has sent its message, and knows nothing when the server is gone."""
    history, odometer = History(), Odometer()
    streams = kept_streams(8, history, odometer, max_tokens=ENDLESS)
    with tiny_server(tmp_path) as server:
        for num_more in (0, 1, 20):
            running = asyncio.create_task(run_all(streams, server.stream_url))
            if num_more:
                await odometer.reach(odometer.num_tokens + num_more)
            else:
                await all_asked(streams)
            server.kill()
            await running
            assert {stream.ends[-1] for stream in streams} == {"broken"}
            await asyncio.to_thread(server.start)
        await run_all(streams, server.stream_url, num_tokens=100)
        assert {stream.ends[-1] for stream in streams} == {"finished"}
        assert num_sessions(server) == len(streams)


async def all_asked(streams: Sequence[KeptStream]) -> None:
    """Returns as soon as each has sent its message."""
    while not all(stream.has_asked for stream in streams):  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)


def test_append_is_fed_once(tmp_path: Path) -> None:
    with tiny_server(tmp_path) as server:
        path, body = f"/v1/sessions/{new_session(server)}/append", {"text": " The fox."}
        first = posted(server, path, **body, idempotency_key="k")
        assert posted(server, path, **body, idempotency_key="k") == first
        server.restart()
        assert posted(server, path, **body, idempotency_key="k") == first
        other = posted(server, path, **body, idempotency_key="l")
    assert other["position"] > first["position"]


@pytest.mark.parametrize("over", ["socket", "http"])
async def test_append_that_a_crash_cut_short_is_ended_and_not_fed_again(
    over: str, tmp_path: Path
) -> None:
    """Its beginning is in the log, so that it continues; a repeated request gets its end."""
    message = {"text": LONG_TEXT, "idempotency_key": "k"}
    with tiny_server(tmp_path) as server:
        session = new_session(server)
        async with opened(server.port) as client:
            append = {"type": "append", "request_id": "a", "session": session, **message}
            # The answer to `create` comes after the append was accepted, and long before its end:
            # the server gets both at once.
            await client.send(text(append) + text({"type": "create", "request_id": "c"}))
            assert (await client.receive_json())["type"] == "created"
            server.kill()
        server.start()
        position = await appended(server, over, session, message)
        assert await appended(server, over, session, message) == position
        info = got(server, f"/v1/sessions/{session}")
        assert (info["position"], info["busy"]) == (position, False)
        (resumed,) = await events_over_http(server.url, session)
        assert resumed["position"] == position


async def appended(server: ServerProcess, over: str, session: str, message: Frame) -> int:
    """Asks, and asks again where it is told to; the position after the append."""
    async with asyncio.timeout(STUCK_S):
        while True:
            if over == "socket":
                async with socket_of(server.stream_url) as socket:
                    await ask(socket, type="append", request_id="a", session=session, **message)
                    frame = await answer_of(socket, "appended")
            else:
                path = f"/v1/sessions/{session}/append"
                async with client_of(server.url) as client:
                    frame = (await client.post(path, json=message)).json()
            if "position" in frame:
                return int(frame["position"])
            assert frame["error"]["code"] == "key_in_use", frame
            await asyncio.sleep(0.05)
