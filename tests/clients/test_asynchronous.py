from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from clients.python import AsyncClient, ConnectionLost, InvalidRequest, NotFound, SessionReset
from tests.waiting import started_task


@pytest.fixture
async def client(server_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server_url, timeout_s=30) as client:
        yield client


async def test_many_generations_over_one_socket(client: AsyncClient) -> None:
    async def text(seed: int) -> str:
        generation = await client.generate("Once", max_tokens=15, seed=seed, ignore_eos=True)
        return await generation.text()

    together = await asyncio.gather(*(text(seed) for seed in range(8)))
    alone = [await text(seed) for seed in range(8)]
    assert together == alone
    assert len(set(together)) > 1


async def test_same_text_over_http_and_websocket(client: AsyncClient) -> None:
    streamed = await client.generate("Once upon", max_tokens=20, seed=5, ignore_eos=True)
    whole = await client.complete("Once upon", max_tokens=20, seed=5, ignore_eos=True)
    assert await streamed.text() == whole.text


async def test_session_lives_until_deleted(client: AsyncClient) -> None:
    session = await client.create_session()
    await session.append("Once upon a time")
    generation = await session.generate(max_tokens=4, seed=2, ignore_eos=True)
    await generation.text()
    assert generation.finished is not None
    assert generation.finished.session == session.id
    assert (await session.info()).position == generation.finished.position
    await session.delete()
    with pytest.raises(NotFound):
        await session.info()


async def test_exit_of_context_manager_cancels(client: AsyncClient) -> None:
    generation = await client.generate("Once", max_tokens=1_000_000, ignore_eos=True)
    async with generation:
        async for _ in generation:
            break
    assert generation.finished is not None
    assert generation.finished.finish_reason == "cancelled"


async def test_cancel_next_to_a_reader_that_was_left_behind_ends(client: AsyncClient) -> None:
    """As Ctrl-C may leave one in the client's thread: one of the two takes the last events."""
    generation = await client.generate("Once", max_tokens=1_000_000, ignore_eos=True)

    async def read() -> None:
        async for _ in generation:
            pass

    left_behind = await started_task(read())
    finished = await generation.cancel()
    await left_behind
    assert finished is not None
    assert finished.finish_reason == "cancelled"


async def test_generation_can_be_used_without_await(client: AsyncClient) -> None:
    options = {"max_tokens": 10, "seed": 1, "ignore_eos": True}
    awaited = await (await client.generate("Once", **options)).text()  # type: ignore[arg-type]
    looped = [e.text async for e in client.generate("Once", **options)]  # type: ignore[arg-type]
    assert "".join(looped) == awaited
    async with client.generate("Once", **options) as generation:  # type: ignore[arg-type]
        assert await generation.text() == awaited


async def test_leaving_a_loop_cancels(client: AsyncClient) -> None:
    session = await client.create_session()
    async for _ in session.generate("Once", max_tokens=1_000_000, ignore_eos=True):
        break
    async with asyncio.timeout(60):
        while (await session.info()).busy:
            pass
    await session.delete()


async def test_task_that_is_cancelled_cancels_its_generation(client: AsyncClient) -> None:
    session = await client.create_session()
    runs = asyncio.Event()

    async def read() -> None:
        async for _ in session.generate("Once", max_tokens=1_000_000, ignore_eos=True):
            runs.set()

    task = asyncio.create_task(read())
    await runs.wait()
    task.cancel()
    await asyncio.wait([task])
    del task  # its error holds the frames that hold the generation
    async with asyncio.timeout(60):
        while (await session.info()).busy:
            pass
    await session.delete()


async def test_errors_are_typed(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await (await client.generate("x", min_p=2.0)).text()
    assert caught.value.param == "min_p"
    (model,) = await client.models()
    assert model["everstream"]["state_bytes_per_session"] > 0
    assert await client.health()


async def test_closing_ends_what_still_runs(server_url: str) -> None:
    client = AsyncClient(server_url, timeout_s=30)
    generation = await client.generate("Once", max_tokens=1_000_000, ignore_eos=True)
    events = aiter(generation)
    await anext(events)
    await client.close()
    with pytest.raises(ConnectionLost):
        async for _ in events:
            pass


async def test_unreachable_server_is_a_connection_lost() -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, AsyncClient(f"http://127.0.0.1:{port}", timeout_s=60) as client:
        with pytest.raises(ConnectionLost):
            await client.generate("x")
        with pytest.raises(ConnectionLost):
            await client.complete("x")
        assert not await client.health()


async def test_session_is_forked_rewound_and_read_again(client: AsyncClient) -> None:
    session = await client.create_session()
    scored = await session.append([1, 2, 3], logprobs=True)
    assert scored.logprobs is not None
    generation = await session.generate(max_tokens=30, seed=1, ignore_eos=True)
    await anext(generation)
    await generation.detach()
    assert [event async for event in generation] == []
    assert generation.last_seq == 1
    resumed = await client.resume(session.id, 1, generation.epoch)
    assert [event.seq async for event in resumed] == list(range(2, 32))
    (fork,) = await session.fork(at=3)
    assert (await session.rewind(3)).position == (await fork.info()).position == 3
    texts = {await one.generate(max_tokens=9, seed=1).text() for one in (session, fork)}
    assert len(texts) == 1
    with pytest.raises(SessionReset):
        await client.resume(session.id, 1, generation.epoch)
    copy = await client.import_session(await fork.export())
    made = {one.id for one in (session, fork, copy)}
    assert made <= {one.id async for one in client.sessions(page_size=2)}
    for one in (session, fork, copy):
        await one.cancel()
        await one.delete()


async def test_work_under_a_key_is_done_once(client: AsyncClient) -> None:
    session = await client.create_session()
    keys = {name: f"{session.id}-{name}" for name in "ag"}
    positions, texts = set(), set()
    for _ in range(2):
        positions.add((await session.append([1, 2], idempotency_key=keys["a"])).position)
        texts.add(await session.generate(max_tokens=6, seed=1, idempotency_key=keys["g"]).text())
    assert (len(positions), len(texts)) == (1, 1)
    await session.delete()
