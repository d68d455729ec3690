"""Connections cut at every event, servers that die: nothing is lost, nothing is repeated."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from clients.python import (
    AsyncClient,
    AsyncGeneration,
    Backoff,
    Client,
    Finished,
    Generation,
    SessionAttached,
    SessionMigrated,
    Token,
)
from tests.clients.javascript.cutter import cutting
from tests.reliability.servers import ServerProcess

PROMPT = [10, 20, 30]
NUM_TOKENS = 9
#: ``started``, the tokens and ``finished``.
NUM_FRAMES = NUM_TOKENS + 2
NAMES = itertools.count(1)


class Seen(NamedTuple):
    """All that a reader sees of an event but the name of its request and its session."""

    seq: int
    position: int
    text: str
    rest: object


def seen(event: Token | Finished) -> Seen:
    rest = event.token_id if isinstance(event, Token) else (event.finish_reason, event.usage)
    return Seen(event.seq, event.position, event.text, rest)


def read(generation: Generation) -> list[Seen]:
    return [seen(event) for event in generation]


@pytest.fixture
def direct(server_url: str) -> Iterator[Client]:
    with Client(server_url, timeout_s=30) as client:
        yield client


@pytest.fixture
def uncut(direct: Client) -> list[Seen]:
    session = direct.create_session()
    generation = session.generate(PROMPT, max_tokens=NUM_TOKENS, seed=3, ignore_eos=True)
    events = read(generation)
    session.delete()
    assert len(events) == NUM_TOKENS + 1
    return events


@pytest.fixture
def proxy_url(server_url: str) -> Iterator[str]:
    port = urlsplit(server_url).port
    assert port is not None
    with cutting(port) as proxy:
        yield f"http://127.0.0.1:{proxy.port}"


def cut_url(proxy_url: str, how: str, num_frames: int) -> str:
    return f"{proxy_url}/cut/{how}/{num_frames}/case{next(NAMES)}"


CUTS = [
    *(("first", num_frames) for num_frames in range(NUM_FRAMES + 1)),
    *(("each", num_frames) for num_frames in (2, 3, 4)),
]


@pytest.mark.parametrize(("how", "num_frames"), CUTS)
def test_disconnect_at_any_event_is_transparent(
    direct: Client, proxy_url: str, uncut: list[Seen], how: str, num_frames: int
) -> None:
    session = direct.create_session()
    with Client(cut_url(proxy_url, how, num_frames), timeout_s=30) as client:
        generation = client.generate(
            PROMPT,
            session=session.id,
            idempotency_key=f"{session.id}-cut",
            max_tokens=NUM_TOKENS,
            seed=3,
            ignore_eos=True,
        )
        assert read(generation) == uncut
        assert generation.finished is not None
        assert (generation.session, generation.last_seq) == (session.id, NUM_TOKENS + 1)
    session.delete()


@pytest.mark.parametrize(("how", "num_frames"), [CUTS[0], CUTS[NUM_FRAMES // 2], CUTS[-1]])
async def test_disconnect_is_transparent_async(
    direct: Client, proxy_url: str, uncut: list[Seen], how: str, num_frames: int
) -> None:
    session = direct.create_session()
    async with AsyncClient(cut_url(proxy_url, how, num_frames), timeout_s=30) as client:
        generation = client.generate(
            PROMPT,
            session=session.id,
            idempotency_key=f"{session.id}-cut",
            max_tokens=NUM_TOKENS,
            seed=3,
            ignore_eos=True,
        )
        assert [seen(event) async for event in generation] == uncut
    session.delete()


@pytest.mark.parametrize("num_frames", range(1, NUM_FRAMES))
def test_cut_needs_no_key_once_a_generation_has_begun(
    direct: Client, proxy_url: str, uncut: list[Seen], num_frames: int
) -> None:
    with Client(cut_url(proxy_url, "first", num_frames), timeout_s=30) as client:
        generation = client.generate(
            PROMPT, keep=True, max_tokens=NUM_TOKENS, seed=3, ignore_eos=True
        )
        assert read(generation) == uncut
        assert generation.session is not None
        direct.session(generation.session).delete()


@pytest.mark.parametrize("num_frames", range(NUM_FRAMES))
def test_disconnect_during_a_resume_is_transparent(
    direct: Client, proxy_url: str, uncut: list[Seen], num_frames: int
) -> None:
    session = direct.create_session()
    for seed in (3, 4):
        session.generate(PROMPT, max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True).text()
    whole = read(direct.resume(session.id, 0))
    assert (whole[: NUM_TOKENS + 1], len(whole)) == (uncut, 2 * NUM_TOKENS + 2)
    with Client(cut_url(proxy_url, "first", num_frames), timeout_s=30) as client:
        assert read(client.resume(session.id, 0)) == whole
    session.delete()


def test_many_generations_survive_one_cut(direct: Client, proxy_url: str) -> None:
    async def together(client: AsyncClient) -> list[list[Seen]]:
        async def one(seed: int) -> list[Seen]:
            generation = client.generate(
                PROMPT,
                keep=True,
                idempotency_key=f"many-{next(NAMES)}",
                max_tokens=NUM_TOKENS,
                seed=seed,
                ignore_eos=True,
            )
            events = [seen(event) async for event in generation]
            assert generation.session is not None
            await asyncio.to_thread(direct.session(generation.session).delete)
            return events

        async with client:
            return await asyncio.gather(*(one(seed) for seed in range(6)))

    expected = asyncio.run(together(AsyncClient(cut_url(proxy_url, "first", 10_000))))
    for num_frames in (1, 7, 20, 45):
        url = cut_url(proxy_url, "first", num_frames)
        assert asyncio.run(together(AsyncClient(url, timeout_s=30))) == expected


def test_append_with_a_key_runs_once_despite_disconnects(direct: Client, proxy_url: str) -> None:
    session = direct.create_session()
    with Client(cut_url(proxy_url, "first", 0), timeout_s=30) as client:
        same = client.session(session.id)
        appended = same.append([1, 2, 3], idempotency_key=f"{session.id}-a")
    assert appended.position == direct.session(session.id).info().position == 3
    session.delete()


def test_cancel_reaches_a_generation_whose_connection_was_cut(
    direct: Client, proxy_url: str
) -> None:
    session = direct.create_session()
    with Client(cut_url(proxy_url, "first", 4), timeout_s=30) as client:
        with client.generate(
            PROMPT, session=session.id, max_tokens=1_000_000, ignore_eos=True
        ) as generation:
            for _ in zip(range(3), generation, strict=False):
                pass
        assert generation.finished is not None
        assert generation.finished.finish_reason == "cancelled"
    assert not session.info().busy
    session.delete()


def test_reader_that_has_taken_over_keeps_the_session(direct: Client, proxy_url: str) -> None:
    """A cut connection does not take a session back from the reader that has it by now."""
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)
        await asyncio.sleep(delay_s)

    session = direct.create_session()
    url = cut_url(proxy_url, "first", 4)
    # Only its waits count, so that it asks some times, however long an answer takes.
    backoff = Backoff(sleep=sleep, clock=lambda: sum(waits))
    with Client(url, timeout_s=30, reconnect_s=0.5, backoff=backoff) as client:
        generation = client.generate(
            PROMPT, session=session.id, max_tokens=1_000_000, ignore_eos=True
        )
        next(generation)  # it has begun: an idle session has nothing to take over
        taken = direct.resume(session.id, 0, take_over=True)
        with pytest.raises(SessionAttached):
            read(generation)
        assert next(taken).seq == 1
        taken.cancel()
    session.delete()


class Durable:
    """The bundled model with a store in a folder, through a kill -9 or an orderly end."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process

    def end(self, how: str) -> None:
        if how == "kill":
            self.process.kill()
        else:
            assert self.process.stop() == 0


@pytest.fixture(scope="module")
def durable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    store = tmp_path_factory.mktemp("durable") / "store"
    with ServerProcess("--threads", 1, "--store", store) as process:
        yield Durable(process)


LENGTH = 200
ENDS = [("kill", (5, 60)), ("stop", (5, 60))]


def transcript(url: str) -> list[Seen]:
    with Client(url, timeout_s=60) as client:
        generation = client.generate(
            "Once upon a time", keep=True, max_tokens=LENGTH, seed=5, ignore_eos=True
        )
        events = read(generation)
        assert generation.session is not None
        client.session(generation.session).delete()
        return events


@pytest.mark.parametrize(("how", "ends"), ENDS)
def test_restarted_server_continues(durable: Durable, how: str, ends: Sequence[int]) -> None:
    expected, events = transcript(durable.process.url), list[Seen]()
    with Client(durable.process.url, timeout_s=60) as client:
        generation = client.generate(
            "Once upon a time", keep=True, max_tokens=LENGTH, seed=5, ignore_eos=True
        )
        for event in generation:
            events.append(seen(event))
            if len(events) in ends:
                durable.end(how)
                durable.process.start()
        assert events == expected
        assert generation.session is not None
        client.session(generation.session).delete()


def test_reader_that_has_recovered_is_replaced_by_take_over(durable: Durable) -> None:
    url = durable.process.url
    with Client(url, timeout_s=60) as client:
        generation = client.generate("Once", keep=True, max_tokens=10**6, seed=5, ignore_eos=True)
        next(generation)
        assert generation.session is not None
        durable.end("kill")
        durable.process.start()
        with Client(url, timeout_s=60) as other:
            last_seq = other.session(generation.session).info().seq
            while generation.last_seq <= last_seq:  # until it has recovered
                next(generation)
            with pytest.raises(SessionAttached):
                other.resume(generation.session, last_seq)
            taken = other.resume(generation.session, last_seq, take_over=True)
            assert next(taken).seq == last_seq + 1
            with pytest.raises(SessionAttached):
                list(generation)
            taken.cancel()
            other.session(generation.session).delete()


@pytest.mark.parametrize(("how", "ends"), ENDS)
async def test_restarted_server_continues_async(
    durable: Durable, how: str, ends: Sequence[int]
) -> None:
    expected = await asyncio.to_thread(transcript, durable.process.url)
    async with AsyncClient(durable.process.url, timeout_s=60) as client:
        generation = client.generate(
            "Once upon a time", keep=True, max_tokens=LENGTH, seed=5, ignore_eos=True
        )
        events = [seen(event) async for event in through(durable, generation, how, ends)]
        assert events == expected
        assert generation.session is not None
        await client.session(generation.session).delete()


async def through(
    durable: Durable, generation: AsyncGeneration, how: str, ends: Sequence[int]
) -> AsyncIterator[Token | Finished]:
    """The events, while the server ends and starts again after some of them."""
    num = 0
    async for event in generation:
        yield event
        num += 1
        if num in ends:
            await asyncio.to_thread(durable.end, how)
            await asyncio.to_thread(durable.process.start)


def test_without_reconnecting_a_server_that_stops_is_an_error(durable: Durable) -> None:
    with Client(durable.process.url, timeout_s=60, reconnect_s=0) as client:
        generation = client.generate("Once", keep=True, max_tokens=1_000_000, ignore_eos=True)
        next(generation)
        durable.end("stop")
        with pytest.raises(SessionMigrated):
            read(generation)
    durable.process.start()
    assert generation.session is not None
    assert generation.last_seq is not None
    with Client(durable.process.url, timeout_s=60) as client:
        resumed = client.resume(generation.session, generation.last_seq, generation.epoch)
        assert next(resumed).seq == generation.last_seq + 1
        resumed.cancel()
        client.session(generation.session).delete()
