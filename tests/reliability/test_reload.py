"""A model is replaced under streams of every kind: none is dropped, and no bit of them changes.

In a real server process. What each stream must be is what an engine says that runs alone.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from benchmarks import sse
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ServerProcess
from tests.reliability.soloist import Soloist
from tests.reliability.streams import ENDLESS, PROMPT, SAMPLING, KeptStream, client_of
from tests.tiny import write_model
from tests.waiting import eventually

NUM_STREAMS = 12
#: So many of a stream are read after a reload.
NUM_TOKENS = 300
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": ENDLESS, **SAMPLING}
ADMIN = {"authorization": "Bearer boss"}


async def completed(
    client: httpx.AsyncClient, odometer: Odometer, seed: int, reloaded: asyncio.Event
) -> list[str]:
    """The texts of a stream of server-sent events, one a token, some of them after the reload."""
    body = {"seed": seed, "stream": True, **BODY}
    texts: list[str] = []
    num_left = NUM_TOKENS
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for event in sse.read(answer.aiter_bytes()):
            texts.append(event.value["choices"][0]["text"])
            await odometer.add()
            num_left -= reloaded.is_set()
            if num_left <= 0:
                break
    return texts


async def reload(client: httpx.AsyncClient) -> bool:
    """Whether there was something new."""
    answer = await client.post("/v1/admin/models/tiny/reload")
    assert answer.status_code == 200, answer.text
    changed: bool = answer.json()["changed"]
    return changed


async def alone_again(client: httpx.AsyncClient) -> None:
    """Returns when no old version is left."""

    async def is_alone() -> bool:
        return len((await client.get("/v1/admin/models")).json()["data"]) == 1

    await eventually(is_alone)


async def streams_of_each_kind(
    server: ServerProcess, client: httpx.AsyncClient, model: Path, then: int
) -> None:
    """Streams that begin before the weights of ``then`` come, and are read on after it."""
    odometer, history, expected = Odometer(), History(), Soloist(model)
    kept = [
        KeptStream(f"{then}-{seed}", history, odometer, seed=seed, **BODY)
        for seed in range(NUM_STREAMS)
    ]
    sockets = [asyncio.create_task(stream.run(server.stream_url, headers=ADMIN)) for stream in kept]
    reloaded = asyncio.Event()
    texts = [
        asyncio.create_task(completed(client, odometer, seed, reloaded))
        for seed in range(NUM_STREAMS)
    ]
    await odometer.reach(NUM_STREAMS * 20)
    write_model(model, then)
    assert await reload(client)
    reloaded.set()
    read = await asyncio.gather(*texts)
    for stream in kept:
        await stream.cancel()
    assert await asyncio.gather(*sockets) == ["finished"] * NUM_STREAMS
    for stream, pieces in zip(kept, read, strict=True):
        num_tokens = max(len(stream.tokens), len(pieces))
        tokens = expected.tokens(**{**stream.body, "max_tokens": num_tokens})
        assert stream.tokens == tokens[: len(stream.tokens)]
        assert expected.text(tokens).startswith("".join(pieces))


async def test_no_stream_is_dropped_or_changed_by_reloads(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    flags = ("--model", f"tiny={model}", "--store", tmp_path / "store", "--threads", 1)
    with ServerProcess(*flags, "--admin-key", "boss") as server:
        async with client_of(server.url) as client:
            client.headers.update(ADMIN)
            for seed in range(3):
                await streams_of_each_kind(server, client, model, then=seed + 1)
                await alone_again(client)
        assert "Traceback" not in server.log()
        assert server.stop() == 0
