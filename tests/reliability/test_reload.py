"""A model is replaced under streams of every kind: none is dropped, and no bit of them changes.

In a real server process. What each stream must be is what an engine says that runs alone.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from model.checkpoint import save_checkpoint
from tests.reliability.history import History
from tests.reliability.servers import ServerProcess
from tests.reliability.streams import (
    KeptStream,
    Odometer,
    Soloist,
    client_of,
    data_of,
    write_tiny_model,
)
from tests.tiny import tiny_checkpoint

NUM_STREAMS = 12
NUM_TOKENS = 1500
SAMPLING: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True, "max_tokens": NUM_TOKENS}
PROMPT = "Who lives in the hollow tree?"
ADMIN = {"authorization": "Bearer boss"}


def replace_weights(model: Path, seed: int) -> None:
    checkpoint = tiny_checkpoint(seed=seed)
    save_checkpoint(model, checkpoint.model, checkpoint.tokenizer)


async def completed(client: httpx.AsyncClient, odometer: Odometer, seed: int) -> str:
    """The text of a stream of server-sent events."""
    body = {"prompt": PROMPT, "seed": seed, "stream": True, **SAMPLING}
    lines: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            lines.append(line)
            if line.startswith("data: {"):
                await odometer.add()
    assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
    chunks = data_of("\n".join(lines))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def reload(client: httpx.AsyncClient) -> bool:
    """Whether there was something new."""
    answer = await client.post("/v1/admin/models/tiny/reload")
    assert answer.status_code == 200, answer.text
    changed: bool = answer.json()["changed"]
    return changed


async def alone_again(client: httpx.AsyncClient) -> None:
    """Returns when no old version is left."""
    async with asyncio.timeout(60):
        while len((await client.get("/v1/admin/models")).json()["data"]) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def streams_of_each_kind(
    server: ServerProcess, client: httpx.AsyncClient, model: Path, then: int
) -> None:
    """Streams that begin before the weights of ``then`` come, and end after it."""
    odometer, history, expected = Odometer(), History(), Soloist(model)
    kept = [
        KeptStream(f"{then}-{seed}", history, odometer, prompt=PROMPT, seed=seed, **SAMPLING)
        for seed in range(NUM_STREAMS)
    ]
    sockets = [asyncio.create_task(stream.run(server.stream_url, headers=ADMIN)) for stream in kept]
    texts = [asyncio.create_task(completed(client, odometer, seed)) for seed in range(NUM_STREAMS)]
    await odometer.reach(NUM_STREAMS * 20)
    replace_weights(model, then)
    assert await reload(client)
    assert not any(task.done() for task in (*sockets, *texts)), "they ended too early to tell"
    assert await asyncio.gather(*sockets) == ["finished"] * NUM_STREAMS
    for seed, (stream, text) in enumerate(zip(kept, await asyncio.gather(*texts), strict=True)):
        tokens = expected.tokens(PROMPT, seed=seed, **SAMPLING)
        assert stream.tokens == tokens
        assert text == expected.text(tokens)


async def test_no_stream_is_dropped_or_changed_by_reloads(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    flags = ("--model", f"tiny={model}", "--store", tmp_path / "store", "--threads", 1)
    with ServerProcess(*flags, "--admin-key", "boss") as server:
        async with client_of(server.url) as client:
            client.headers.update(ADMIN)
            for seed in range(3):
                await streams_of_each_kind(server, client, model, then=seed + 1)
                await alone_again(client)
        assert "Traceback" not in server.log()
        assert server.stop() == 0
