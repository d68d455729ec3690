"""A session's log as a durable stream: every offset, every way to wait, and what it cannot do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from benchmarks import sse
from server.api import durable_streams
from server.runtime.readers import Follower, Followers
from server.sessions import log_text
from server.store.sqlite.store import MemoryStore
from server.store.table_store import StoreLimits
from tests.fakes import FakeEngine
from tests.server.api.keys import ALICE, BOB, bearer
from tests.server.api.talk import Message, create, info, kept, left, post, story, until
from tests.server.harness import Running, running

START = "0" * 16


async def get(server: Running, session: str, **query: object) -> httpx.Response:
    params = {name.replace("_", "-"): str(value) for name, value in query.items()}
    return await server.http.get(f"/v1/sessions/{session}/stream", params=params)


async def head(server: Running, session: str, **query: str) -> httpx.Headers:
    answer = await server.http.head(f"/v1/sessions/{session}/stream", params=query)
    assert (answer.status_code, answer.content) == (200, b"")
    return answer.headers


async def tail(server: Running, session: str) -> str:
    return (await head(server, session))["stream-next-offset"]


def texts(messages: list[Message]) -> str:
    return "".join(message["text"] for message in messages if message["type"] != "input")


def sse_events(body: str) -> list[tuple[str, Any]]:
    """(kind, data) of each server-sent event; of data events the text as it is."""
    return [
        (str(event.name), event.value if event.name == "control" else event.data)
        for event in sse.events_of(body)
    ]


async def test_stream_has_what_was_fed_and_generated(server: Running) -> None:
    session = await kept(server, 3)
    answer = await get(server, session)
    assert answer.headers["content-type"] == "application/json"
    fed, *tokens, end = answer.json()
    request_id = fed.pop("request_id")
    assert fed == {"type": "input", "seq": 0, "position": 0, "tokens": 2, "text": "hi"}
    assert [token["type"] for token in tokens] == ["token"] * 3
    assert [token["seq"] for token in tokens] == [1, 2, 3]
    assert (end["type"], end["seq"], end["finish_reason"]) == ("finished", 4, "length")
    assert {message["request_id"] for message in (*tokens, end)} == {request_id}
    assert texts([*tokens, end]) == story(2, 3)
    assert answer.headers["stream-up-to-date"] == "true"
    assert "stream-closed" not in answer.headers  # the session may continue


async def test_every_offset_resumes_and_offsets_sort(server: Running) -> None:
    session = await kept(server, 3)
    await post(server, session, "append", text="more")
    whole = (await get(server, session, offset=-1)).json()
    assert [message["type"] for message in whole[-2:]] == ["input", "appended"]
    offsets = [log_text.offset_of(log_text.Place(number)) for number in range(len(whole) + 1)]
    assert offsets == sorted(offsets)
    for place, offset in enumerate(offsets):
        answer = await get(server, session, offset=offset)
        assert answer.json() == whole[place:]
        assert answer.headers["stream-next-offset"] == offsets[-1] == await tail(server, session)


async def test_chunks_add_up_to_the_stream(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_text, "CHUNK_TOKENS", 7)
    session = await kept(server, 20)
    found: list[Message] = []
    answer = await get(server, session)
    while "stream-up-to-date" not in answer.headers:
        assert answer.headers["cache-control"].startswith("private, max-age=")
        found += answer.json()
        answer = await get(server, session, offset=answer.headers["stream-next-offset"])
    assert answer.headers["cache-control"] == "private, no-cache"
    assert texts(found + answer.json()) == story(2, 20)


async def test_now_is_the_end_and_has_no_message(server: Running) -> None:
    session = await kept(server, 3)
    answer = await get(server, session, offset="now")
    assert (answer.json(), answer.headers["cache-control"]) == ([], "no-store")
    assert answer.headers["stream-up-to-date"] == "true"
    assert "etag" not in answer.headers
    await server.generate(prompt="", session=session, max_tokens=2, seed=0)
    following = await get(server, session, offset=answer.headers["stream-next-offset"])
    assert texts(following.json()) == story(5, 2)


async def test_client_that_has_a_chunk_gets_304(server: Running) -> None:
    session = await kept(server, 3)
    answer = await get(server, session)
    url, tag = f"/v1/sessions/{session}/stream", answer.headers["etag"]
    for known in (tag, f"W/{tag}", f'"another", {tag}'):
        again = await server.http.get(url, headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["stream-next-offset"] == answer.headers["stream-next-offset"]
    await post(server, session, "append", text="more")
    changed = await server.http.get(url, headers={"if-none-match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag


async def test_head_tells_the_end_and_is_not_cached(server: Running) -> None:
    session = await create(server)
    headers = await head(server, session)
    assert headers["stream-next-offset"] == START
    assert headers["content-type"] == "application/json"
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("offset=", "offset"),
        ("offset=1", "offset"),
        ("offset=-2", "offset"),
        ("offset=0000000000000000,1", "offset"),
        ("offset=%D9%A0000000000000000", "offset"),
        ("offset=9999999999999999", "offset"),
        ("offset=-1&offset=now", "offset"),
        ("live=sse", "offset"),
        ("live=long-poll", "offset"),
        ("offset=-1&live=true", "live"),
        ("offset=-1&live=sse&cursor=x", "cursor"),
        ("offset=-1&format=xml", "format"),
        ("offset=-1&turn=now", "turn"),
        (f"offset={START}&turn=0000000000000009", "turn"),
    ],
)
async def test_bad_parameters_are_named(server: Running, query: str, param: str) -> None:
    session = await create(server)
    answer = await server.http.get(f"/v1/sessions/{session}/stream?{query}")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", param)


async def test_unknown_parameters_are_ignored(server: Running) -> None:
    session = await kept(server, 3)
    assert texts((await get(server, session, whatever="x")).json()) == story(2, 3)


async def test_no_method_writes(server: Running) -> None:
    session = await create(server)
    for method in ("PUT", "POST", "DELETE", "PATCH"):
        answer = await server.http.request(method, f"/v1/sessions/{session}/stream", content=b"x")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
        assert answer.json()["error"]["code"] == "method_not_allowed"
    assert await tail(server, session) == START


async def test_absent_and_deleted_sessions_are_not_found(server: Running) -> None:
    session = await kept(server, 3)
    await server.http.delete(f"/v1/sessions/{session}")
    for name in (session, "sess_none"):
        for query in ({}, {"offset": "now"}, {"offset": "-1", "live": "sse"}):
            assert (await get(server, name, **query)).status_code == 404
        found = await server.http.head(f"/v1/sessions/{name}/stream")
        assert found.status_code == 404


async def test_trimmed_offsets_are_gone_and_the_oldest_is_the_beginning() -> None:
    store = MemoryStore(limits=StoreLimits(max_log_tokens=64))
    async with running(store=store) as server:
        session = await kept(server, 500)
        await server.generate(prompt="", session=session, max_tokens=20, seed=0)
        await server.async_engine.ask_store(lambda store: store.maintain(1e6))
        answer = await get(server, session, offset=START)
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "history_gone")
        first, *_, last = (await get(server, session)).json()
        assert first["seq"] > 1
        assert last["type"] == "finished"


async def test_rewind_is_a_message_and_changes_no_earlier_one(server: Running) -> None:
    session = await kept(server, 5)
    before = (await get(server, session)).json()
    await post(server, session, "rewind", at=4)
    await server.generate(prompt="", session=session, max_tokens=2, seed=0)
    after = (await get(server, session)).json()
    assert after[: len(before)] == before
    rewound, fed, *rest = after[len(before) :]
    assert (rewound["type"], rewound["position"]) == ("rewound", 4)
    assert rewound["epoch"] == (await info(server, session))["epoch"]
    assert (fed["type"], fed["position"], texts(rest)) == ("input", 4, story(4, 2))


async def test_fork_begins_a_stream_of_its_own(server: Running) -> None:
    session = await kept(server, 3)
    fork = (await post(server, session, "fork")).json()["sessions"][0]
    await server.generate(prompt="", session=fork, max_tokens=2, seed=0)
    assert texts((await get(server, fork)).json()) == story(5, 2)
    assert texts((await get(server, session)).json()) == story(2, 3)


# Formats


async def test_text_is_the_sessions_text(server: Running) -> None:
    session = await kept(server, 5)
    answer = await get(server, session, format="text")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == "hi" + story(2, 5)


async def test_formats_of_pages_have_each_turn_between_its_marks(server: Running) -> None:
    session = await kept(server, 5)
    await post(server, session, "append", text="more")
    chunks = (await get(server, session, format="ai-sdk")).json()
    kinds = [chunk["type"] for chunk in chunks]
    assert kinds == ["start", "text-start", *["text-delta"] * 5, "text-end", "finish"]
    assert "".join(chunk.get("delta", "") for chunk in chunks) == story(2, 5)
    events = (await get(server, session, format="ag-ui")).json()
    assert [event["type"] for event in events] == [
        *("RUN_STARTED", "TEXT_MESSAGE_START"),
        *["TEXT_MESSAGE_CONTENT"] * 5,
        *("TEXT_MESSAGE_END", "RUN_FINISHED"),
    ]
    assert "".join(event.get("delta", "") for event in events) == story(2, 5)


# One turn


async def test_stream_of_a_turn_is_closed_by_its_end(server: Running) -> None:
    session = await kept(server, 2)
    turn = await tail(server, session)
    assert (await get(server, session, turn=turn)).json() == []
    for _ in range(2):  # what comes after the turn is not its
        await server.generate(prompt="", session=session, max_tokens=3, seed=0)
    answer = await get(server, session, turn=turn, offset=-1)
    assert texts(answer.json()) == story(4, 3)
    end, tag = answer.headers["stream-next-offset"], answer.headers["etag"]
    assert answer.headers["stream-closed"] == "true"
    assert tag.endswith(':c"')
    assert (await head(server, session, turn=turn))["stream-next-offset"] == end
    for offset in (end, "now"):
        empty = await get(server, session, turn=turn, offset=offset)
        assert (empty.json(), empty.headers["stream-closed"]) == ([], "true")
        polled = await get(server, session, turn=turn, offset=offset, live="long-poll")
        assert (polled.status_code, polled.headers["stream-closed"]) == (204, "true")
        ((kind, control),) = sse_events(
            (await get(server, session, turn=turn, offset=offset, live="sse")).text
        )
        assert kind == "control"
        assert control == {"streamNextOffset": end, "upToDate": True, "streamClosed": True}


# Waiting


class Counted(Followers):
    """Knows how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self._number, self._changed = 0, asyncio.Event()

    @contextmanager
    def follow(self, session: str, owner: str) -> Iterator[Follower]:
        with super().follow(session, owner) as follower:
            self._add(1)
            try:
                yield follower
            finally:
                self._add(-1)

    def _add(self, num: int) -> None:
        self._number += num
        self._changed.set()

    async def until(self, num: int) -> None:
        async with asyncio.timeout(60):
            while self._number != num:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def followers(server: Running) -> Counted:
    server.async_engine.followers = Counted()
    return server.async_engine.followers


async def test_long_poll_waits_for_the_next_message(server: Running, followers: Counted) -> None:
    session = await kept(server, 2)
    for offset in (await tail(server, session), "now"):
        before = (await info(server, session))["position"]
        polling = asyncio.ensure_future(get(server, session, offset=offset, live="long-poll"))
        await followers.until(1)
        await post(server, session, "append", text="more")
        answer = await polling
        assert answer.status_code == 200
        assert answer.json()[0]["position"] == before
        assert int(answer.headers["stream-cursor"]) > 0
        assert answer.headers["etag"]


async def test_long_poll_answers_at_once_with_what_there_is(server: Running) -> None:
    session = await kept(server, 3)
    answer = await get(server, session, offset=-1, live="long-poll")
    assert texts(answer.json()) == story(2, 3)
    cursor = int(answer.headers["stream-cursor"])
    again = await get(server, session, offset=-1, live="long-poll", cursor=cursor)
    assert int(again.headers["stream-cursor"]) > cursor


async def test_long_poll_without_news_ends_with_204(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_streams, "LONG_POLL_S", 0.01)
    session = await kept(server, 3)
    end = await tail(server, session)
    answer = await get(server, session, offset=end, live="long-poll")
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["stream-next-offset"] == end
    assert answer.headers["stream-up-to-date"] == "true"
    assert int(answer.headers["stream-cursor"]) > 0


async def test_sse_sends_each_chunk_and_where_it_ends(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_streams, "SSE_S", 0.01)
    monkeypatch.setattr(log_text, "CHUNK_TOKENS", 3)
    session = await kept(server, 5)
    answer = await get(server, session, offset=-1, live="sse", format="text")
    assert answer.headers["content-type"] == "text/event-stream"
    events = sse_events(answer.text)
    text = "".join(data for kind, data in events if kind == "data")
    assert text == ("hi" + story(2, 5))[: len(text)]
    controls = [data for kind, data in events if kind == "control"]
    assert [kind for kind, _ in events] == ["data", "control"] * len(controls)
    assert all(control["streamCursor"].isdigit() for control in controls)
    rest = await get(
        server, session, offset=controls[-1]["streamNextOffset"], live="sse", format="text"
    )
    assert "upToDate" in sse_events(rest.text)[-1][1] or "upToDate" in controls[-1]


async def test_sse_follows_without_taking_the_session_from_its_reader(
    server: Running, followers: Counted
) -> None:
    session = await create(server)
    body = {"prompt": "hi", "session": session, "max_tokens": 4, "seed": 0}
    following = asyncio.ensure_future(
        get(server, session, offset="now", live="sse", turn=START, format="text")
    )
    await followers.until(1)
    assert (await server.generate(**body)).json()["choices"][0]["text"] == story(2, 4)
    events = sse_events((await following).text)
    assert "".join(data for kind, data in events if kind == "data") == "hi" + story(2, 4)
    assert events[-1][1]["streamClosed"] is True


async def test_line_breaks_of_a_text_are_within_its_event(server: Running) -> None:
    session = await create(server)
    await post(server, session, "append", text="a\n\ndata: b\r\nevent: control\rc")
    url = f"/v1/sessions/{session}/stream?offset=-1&live=sse&format=text"
    async with server.http.stream("GET", url) as response:
        body = ""
        async for piece in response.aiter_text():
            body += piece
            if "upToDate" in body:
                break
    (kind, data), (second, _) = sse_events(body)
    assert (kind, data, second) == ("data", "a\n\ndata: b\nevent: control\nc", "control")


async def test_parked_session_stays_parked() -> None:
    async with running(FakeEngine(max_detached_tokens=20)) as server:
        session = await left(server)
        await until(server, lambda stats: stats.num_parked == 1)
        assert (await info(server, session))["parked"]
        found = (await get(server, session)).json()
        assert found[-1]["type"] == "token"
        assert (await info(server, session))["parked"]


async def test_session_that_sleeps_in_the_store_stays_there() -> None:
    store = MemoryStore(durable=True)
    async with running(FakeEngine(can_evict=True), store=store) as server:
        session = await kept(server, 3)
        assert await server.async_engine.evict(1) == 1
        assert texts((await get(server, session)).json()) == story(2, 3)
        assert (await get(server, session, offset="now")).status_code == 200
        assert (await server.stats()).num_sessions == 0


async def test_client_that_leaves_is_no_follower_any_more(
    server: Running, followers: Counted
) -> None:
    session = await create(server)
    url = f"/v1/sessions/{session}/stream?offset=-1&live=sse"
    async with server.http.stream("GET", url) as response:
        await anext(response.aiter_lines())
        await followers.until(1)
    await followers.until(0)


async def test_followers_end_when_the_server_drains(server: Running, followers: Counted) -> None:
    session = await create(server)
    waiting = [
        asyncio.ensure_future(get(server, session, offset="now", live=live))
        for live in ("sse", "long-poll")
    ]
    await followers.until(2)
    server.async_engine.begin_drain()
    streamed, polled = await asyncio.gather(*waiting)
    assert sse_events(streamed.text)[-1][1]["upToDate"] is True
    assert polled.status_code == 204


async def test_other_tenants_find_no_stream() -> None:
    async with running(api_keys=(ALICE, BOB)) as server:
        made = await server.http.post("/v1/sessions", headers=bearer(ALICE))
        url = f"/v1/sessions/{made.json()['session']}/stream"
        for query in ("", "?offset=now", "?offset=-1&live=sse", "?offset=-1&live=long-poll"):
            theirs = await server.http.get(url + query, headers=bearer(BOB))
            none = await server.http.get("/v1/sessions/none/stream", headers=bearer(BOB))
            assert (theirs.status_code, theirs.content) == (404, none.content)
        assert (await server.http.head(url, headers=bearer(BOB))).status_code == 404
        assert (await server.http.head(url, headers=bearer(ALICE))).status_code == 200
