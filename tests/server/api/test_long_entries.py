"""Long prompts in a session's log: read in parts, once for many, and by HEAD not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import sse
from server.sessions import log_text
from server.sessions.log_text import Place, offset_of
from server.store.base import Numbered
from server.store.sqlite.store import MemoryStore
from tests.fakes import ByteTokenizer
from tests.server.api.keys import ALICE, BOB, bearer, entry
from tests.server.api.talk import create, post, story
from tests.server.harness import Running, running

TEXT = "é漢🦊 a fox, " * 4
NUM_TOKENS = len(TEXT.encode())
NUM_FOLLOWERS = 20


class CountingTokenizer(ByteTokenizer):
    """Knows how many tokens were decoded."""

    num_decoded = 0

    def token_bytes(self, id: int) -> bytes:
        self.num_decoded += 1
        return super().token_bytes(id)


class CountingStore(MemoryStore):
    """Knows how often a log was read."""

    num_read = 0

    def entries(self, session: str, owner: str, place: int, max_entries: int) -> Numbered:
        self.num_read += 1
        return super().entries(session, owner, place, max_entries)


@pytest.fixture
def tokenizer() -> CountingTokenizer:
    return CountingTokenizer()


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
async def server(
    tokenizer: CountingTokenizer, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    monkeypatch.setattr(log_text, "CHUNK_TOKENS", 7)
    async with running(store=store, tokenizer=tokenizer) as server:
        yield server


async def read(server: Running, session: str, **query: str) -> httpx.Response:
    return await server.http.get(f"/v1/sessions/{session}/stream", params=query)


async def test_long_prompt_is_read_in_parts_from_any_of_their_offsets(server: Running) -> None:
    session = await create(server)
    await post(server, session, "append", text=TEXT)
    await post(server, session, "append", text="end")
    found, offsets, messages = list[Any](), list[str](), list[list[Any]]()
    answer = await read(server, session)
    while True:
        messages.append(answer.json())
        found += answer.json()
        offsets.append(answer.headers["stream-next-offset"])
        if "stream-up-to-date" in answer.headers:
            break
        answer = await read(server, session, offset=offsets[-1])
    fed = [message for message in found if message["type"] == "input"]
    assert "".join(message["text"] for message in fed) == TEXT + "end"
    assert [message["tokens"] for message in fed] == [*[7] * (NUM_TOKENS // 7), NUM_TOKENS % 7, 3]
    ends = [message["position"] + message["tokens"] for message in fed]
    assert [message["position"] for message in fed] == [0, *ends[:-1]]
    assert len({message["request_id"] for message in fed}) == 2
    assert offsets == sorted(offsets)
    for number, offset in enumerate(offsets[:-1], 1):
        assert (await read(server, session, offset=offset)).json() == messages[number]


async def test_text_of_the_parts_is_the_sessions(server: Running) -> None:
    session = await create(server)
    await post(server, session, "append", text=TEXT)
    text, answer = "", await read(server, session, format="text")
    while "stream-up-to-date" not in answer.headers:
        text += answer.text
        offset = answer.headers["stream-next-offset"]
        answer = await read(server, session, format="text", offset=offset)
    assert text + answer.text == TEXT


@pytest.mark.parametrize("format", ["events", "text", "ai-sdk"])
async def test_offset_behind_a_shorter_prompt_leads_on(server: Running, format: str) -> None:
    """Of a part that the prompt does not have, or that the format does not cut."""
    session = await create(server)
    await post(server, session, "append", text="hi")
    answer = await read(server, session, format=format, offset=offset_of(Place(0, 7)))
    assert answer.status_code == 200
    assert answer.headers["stream-next-offset"] == offset_of(Place(2))


async def test_offset_within_a_part_is_refused(server: Running) -> None:
    session = await create(server)
    answer = await read(server, session, offset=offset_of(Place(0, 6)))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "offset")


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("stream", {}),
        ("stream", {"turn": "0" * 16}),
        ("stream", {"offset": "-1", "live": "sse"}),
        ("text", {}),
        ("events", {}),
    ],
)
async def test_head_reads_no_text_and_takes_nothing(
    server: Running, tokenizer: CountingTokenizer, path: str, query: dict[str, str]
) -> None:
    session = await create(server)
    await post(server, session, "append", text=TEXT)
    tokenizer.num_decoded = 0
    answer = await server.http.head(f"/v1/sessions/{session}/{path}", params=query)
    assert (answer.status_code, answer.content) == (200, b"")
    assert tokenizer.num_decoded == 0
    absent = await server.http.head(f"/v1/sessions/sess_none/{path}", params=query)
    assert absent.status_code == 404


async def test_formats_without_the_prompt_decode_none_of_it(
    server: Running, tokenizer: CountingTokenizer
) -> None:
    session = await create(server)
    await post(server, session, "append", text=TEXT)
    tokenizer.num_decoded = 0
    for format in ("ai-sdk", "ag-ui"):
        assert (await read(server, session, format=format)).json() == []
    assert tokenizer.num_decoded == 0


async def test_part_of_a_prompt_decodes_little_more_than_itself(
    server: Running, tokenizer: CountingTokenizer
) -> None:
    session = await create(server)
    await post(server, session, "append", text=TEXT)
    tokenizer.num_decoded = 0
    await read(server, session, offset=offset_of(Place(0, 14)))
    assert 7 <= tokenizer.num_decoded <= 7 + 2 * 3  # what may begin a character, looked at twice


async def test_followers_of_a_session_share_its_reads(
    server: Running, store: CountingStore, tokenizer: CountingTokenizer
) -> None:
    session, more = await create(server), "more é"
    url = f"/v1/sessions/{session}/stream?offset=now&live=sse&format=text"
    waiting = asyncio.Semaphore(0)

    async def follow() -> str:
        body = ""
        async with server.http.stream("GET", url) as response:
            async for piece in response.aiter_text():
                body += piece
                if "event: data" in body:
                    break
                waiting.release()
        return "".join(str(one.data) for one in sse.events_of(body) if one.name == "data")

    async with asyncio.TaskGroup() as group:
        following = [group.create_task(follow()) for _ in range(NUM_FOLLOWERS)]
        for _ in following:
            await waiting.acquire()
        store.num_read = tokenizer.num_decoded = 0
        await post(server, session, "append", text=more)
    assert {task.result() for task in following} == {more}
    # They are woken by the beginning and by the end of the append, and may read after each.
    assert store.num_read <= 4
    assert tokenizer.num_decoded <= 2 * len(more.encode())


async def test_tenants_followers_are_bounded_and_others_follow_and_run(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    scopes = ("generate", "sessions")
    keys.write_text(
        entry("alice", ALICE, *scopes, max_running=2) + entry("bob", BOB, *scopes, max_running=2)
    )
    keys.chmod(0o600)
    async with running(keys_file=keys) as server, AsyncExitStack() as following:

        async def follow(key: str) -> httpx.Response:
            made = await server.http.post("/v1/sessions", headers=bearer(key))
            url = f"/v1/sessions/{made.json()['session']}/stream?offset=-1&live=sse"
            stream = server.http.stream("GET", url, headers=bearer(key))
            return await following.enter_async_context(stream)

        assert [(await follow(ALICE)).status_code for _ in range(2)] == [200, 200]
        refused = await follow(ALICE)
        await refused.aread()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert refused.json()["error"]["code"] == "too_many_followers"
        assert (await follow(BOB)).status_code == 200
        for key in (ALICE, BOB):
            body = {"prompt": "hi", "max_tokens": 2, "seed": 0}
            answer = await server.http.post("/v1/completions", json=body, headers=bearer(key))
            assert answer.json()["choices"][0]["text"] == story(2, 2)
