"""9: the same work under the same key twice, also across a crash: it is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.websocket import text
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.raw_websocket import opened
from tests.reliability.servers import ServerProcess
from tests.reliability.sites import Site
from tests.reliability.streams import (
    PROMPT,
    SAMPLING,
    Frame,
    KeptStream,
    answer_of,
    ask,
    client_of,
    events_of,
    events_over_http,
    run_all,
    socket_of,
    tiny_server,
)
from tests.waiting import eventually

LONG_TEXT = "Only the wind, said she, and he is not at home. " * 500
BODY: dict[str, Any] = {"prompt": PROMPT, "seed": 3, **SAMPLING}
#: What a second one is told, who must ask again.
NOT_YET = {"key_in_use", "session_attached", "session_elsewhere", "session_busy"}


async def generated(server: ServerProcess, key: str, max_tokens: int = 50) -> list[Frame]:
    """Everything that one connection gets for the work."""
    stream = KeptStream(key, History(), max_tokens=max_tokens, **BODY)
    await stream.run(server.stream_url)
    return stream.frames


async def generated_in_the_end(
    server: ServerProcess, key: str, max_tokens: int = 50
) -> list[Frame]:
    """The same, asked for until it is told."""

    async def told() -> list[Frame] | None:
        frames = await generated(server, key, max_tokens)
        if frames and frames[-1]["type"] == "finished":
            return frames
        assert not frames or frames[-1]["error"]["code"] in NOT_YET, frames[-1]
        return None

    return await eventually(told)


async def new_session(server: ServerProcess) -> str:
    async with client_of(server.url) as client:
        return str((await client.post("/v1/sessions")).json()["session"])


async def num_sessions(server: ServerProcess) -> int:
    async with client_of(server.url) as client:
        return len((await client.get("/v1/sessions")).json()["data"])


async def test_same_work_at_the_same_moment_is_done_once(site: Site) -> None:
    """The others are told to come again, or that the first has its events, or all of them."""
    servers = (*site.servers, site.servers[0])
    for number in range(5):
        key = f"work {number}"
        told = await asyncio.gather(*(generated(server, key) for server in servers))
        whole = [frames for frames in told if frames[-1]["type"] == "finished"]
        refused = {frames[-1]["error"]["code"] for frames in told if frames not in whole}
        assert whole
        assert [frames[0]["type"] for frames in whole].count("started") == 1
        assert refused <= NOT_YET
        again = [await generated_in_the_end(server, key) for server in servers]
        assert {frames[0]["type"] for frames in again} == {"resumed"}
        assert all(events_of(frames) == events_of(whole[0]) for frames in (*whole, *again))
        assert [frame["seq"] for frame in events_of(whole[0])] == list(range(1, 52))
    assert await num_sessions(site.servers[0]) == 5


async def test_result_of_a_crashed_server_is_returned_after_it(site: Site) -> None:
    """The work may have begun, or never have been heard of; the client knows nothing."""
    for number, num_seen in enumerate((0, 1, 20)):
        odometer = Odometer()
        keys = [f"{number} {index}" for index in range(8)]
        streams = [KeptStream(key, History(), odometer, max_tokens=300, **BODY) for key in keys]
        asking = asyncio.create_task(run_all(streams, site.servers[0].stream_url))
        await (odometer.reach(num_seen) if num_seen else all_asked(streams))
        await site.crash()
        await asking
        told = await asyncio.gather(
            *(generated_in_the_end(site.survivors[0], key, 300) for key in keys)
        )
        for stream, frames in zip(streams, told, strict=True):
            seen = events_of(stream.frames)
            assert seen == events_of(frames)[: len(seen)]
            assert [frame["seq"] for frame in events_of(frames)] == list(range(1, 302))
        assert await num_sessions(site.survivors[0]) == 8 * (number + 1)
        await site.repair()


async def all_asked(streams: Sequence[KeptStream]) -> None:
    """Returns as soon as each has sent its message."""
    while not all(stream.has_asked for stream in streams):  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0)


async def test_append_runs_once(site: Site) -> None:
    session = await new_session(site.servers[0])
    body = {"text": " The fox." * 50, "idempotency_key": "k"}
    answers = await asyncio.gather(
        *(appended(server, "http", session, body) for server in site.servers for _ in range(3))
    )
    assert all(answer == answers[0] for answer in answers), answers
    await site.crash()
    for server in site.survivors:
        assert await appended(server, "http", session, body) == answers[0]
    other = await appended(site.survivors[0], "http", session, {**body, "idempotency_key": "l"})
    assert other["position"] > answers[0]["position"]


@pytest.mark.parametrize("over", ["socket", "http"])
async def test_append_that_a_crash_cut_short_is_ended_and_not_fed_again(
    over: str, tmp_path: Path
) -> None:
    """Its beginning is in the log, so that it continues; a repeated request gets its end."""
    message = {"text": LONG_TEXT, "idempotency_key": "k"}
    with tiny_server(tmp_path) as server:
        session = await new_session(server)
        async with opened(server.port) as client:
            append = {"type": "append", "request_id": "a", "session": session, **message}
            # The answer to `create` comes after the append was accepted, and long before its end:
            # the server gets both at once.
            await client.send(text(append) + text({"type": "create", "request_id": "c"}))
            assert (await client.receive_json())["type"] == "created"
            server.kill()
        server.start()
        position = (await appended(server, over, session, message))["position"]
        assert (await appended(server, over, session, message))["position"] == position
        async with client_of(server.url) as http:
            info = (await http.get(f"/v1/sessions/{session}")).json()
        assert (info["position"], info["busy"]) == (position, False)
        (resumed,) = await events_over_http(server.url, session)
        assert resumed["position"] == position


async def appended(server: ServerProcess, over: str, session: str, message: Frame) -> Frame:
    """Asks, and asks again where it is told to; the answer."""

    async def told() -> Frame | None:
        if over == "socket":
            async with socket_of(server.stream_url) as socket:
                await ask(socket, type="append", request_id="a", session=session, **message)
                frame = await answer_of(socket, "appended")
        else:
            path = f"/v1/sessions/{session}/append"
            async with client_of(server.url) as client:
                frame = (await client.post(path, json=message)).json()
        if "position" in frame:
            return frame
        assert frame["error"]["code"] in NOT_YET, frame
        return None

    return await eventually(told)
