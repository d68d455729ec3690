"""7: a snapshot at n and a replay to m lead to what the uninterrupted run has, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server.engine.session import SessionValue
from tests.reliability.history import History, event_of_frame
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ServerProcess
from tests.reliability.streams import (
    Backend,
    Frame,
    KeptStream,
    answer_of,
    ask,
    opened_store,
    run_all,
    socket_of,
)
from tests.tiny import write_model
from tests.waiting import eventually

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
#: What a continuation depends on, apart from the state: penalties, held back text, half characters.
BODIES: Sequence[dict[str, Any]] = [
    {"prompt": [5]},
    {"prompt": [7 + index % 90 for index in range(63)], "top_k": 40},
    {"prompt": [9 + index % 80 for index in range(64)], **PENALTIES},
    {"prompt": [11 + index % 70 for index in range(65)], "temperature": 0},
    {"prompt": "A café — “so”, she said, naïve. ", "min_p": 0.01},
    {"prompt": [13 + index % 60 for index in range(30)], "top_n_sigma": 2.0, "top_p": 1},
    {"prompt": "Once. Once. Once", "dry_multiplier": 3, "dry_allowed_length": 1, "temperature": 0},
    {"prompt": "The cat sat. ", "xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"prompt": "Who lives there?", "stop": ["e never", "a never", " never"]},
]
#: How many tokens of each session have been seen, on average, when the server is killed.
KILLS = (1, 70, 130, 190)


def streams_of(odometer: Odometer, num_tokens: int) -> list[KeptStream]:
    common = {"max_tokens": num_tokens, "ignore_eos": True}
    return [
        KeptStream(f"c{seed}", History(), odometer, **{"seed": seed, **common, **body})
        for seed, body in enumerate(BODIES)
    ]


async def one_more_turn(url: str, streams: Sequence[KeptStream]) -> list[list[Frame]]:
    """What each session says next; its state is that of its last token then."""
    turns = []
    async with socket_of(url) as socket:
        for seed, stream in enumerate(streams):
            where = {"request_id": stream.name, "session": stream.session}
            await ask(socket, type="append", text=" The end.", logprobs=True, **where)
            frames = [await answer_of(socket, "appended")]
            await ask(socket, type="generate", max_tokens=20, seed=seed, ignore_eos=True, **where)
            while frames[-1]["type"] not in ("finished", "error"):
                frames.append(await answer_of(socket, "token", "finished"))
            turns.append([known(frame) for frame in frames])
    return turns


def known(frame: Frame) -> Frame:
    """What of a frame does not depend on the session's name."""
    return {name: value for name, value in frame.items() if name != "session"}


def values_of(
    store_folder: Path, model: Path, backend: Backend, streams: Sequence[KeptStream]
) -> list[SessionValue]:
    """What a store has of sessions that were saved at their end."""
    store = opened_store(store_folder, model, backend)
    try:
        loaded = [store.load(stream.session, owner_of(store, stream)) for stream in streams]
    finally:
        store.close()
    assert not any(one.entries for one in loaded)
    return [one.value for one in loaded]


def owner_of(store: Any, stream: KeptStream) -> str:
    (owner,) = {one.owner for one in store.list(None, None, 1000) if one.id == stream.session}
    return str(owner)


def bits(value: SessionValue) -> object:
    """All that a continuation depends on."""
    assert value.state is not None
    return (
        value.state.data.tobytes(),
        *(value.position, value.unfed, value.pending, value.seq),
        *(value.recent, value.undecoded, value.progress),
    )


async def a_state_is_saved(store: Path, running: asyncio.Task[Any]) -> None:
    """Returns when another state is on the disk, or none will be written any more."""

    def files() -> set[Path]:
        return set(store.glob("snapshots/*/*.safetensors"))

    before = files()
    await eventually(lambda: running.done() or bool(files() - before))


async def check_same(
    folder: Path, save_interval: int, num_tokens: int, kills: Sequence[int], backend: Backend
) -> None:
    """With an interval below the number of tokens, a state is saved before each kill.

    Else the clients are held at each: no stream can have ended before the first one.
    """
    saves = save_interval < num_tokens
    model = write_model(folder / "model")
    environment = {"EVERSTREAM_SAVE_INTERVAL_TOKENS": str(save_interval)}
    results: list[tuple[list[Any], ...]] = []
    for name, moments in (("whole", ()), ("killed", kills)):
        store, odometer = folder / name, Odometer()
        streams = streams_of(odometer, num_tokens)
        flags = ("--model", model, "--store", store, "--backend", backend)
        with ServerProcess(*flags, environment=environment) as server:
            for moment in moments:
                if not saves:
                    odometer.hold_at(moment * len(streams))
                running = asyncio.create_task(run_all(streams, server.stream_url))
                await odometer.reach(moment * len(streams))
                if saves:
                    await a_state_is_saved(store, running)
                server.kill()
                await odometer.release()
                await running
                await asyncio.to_thread(server.start)
            await run_all(streams, server.stream_url)
            assert {stream.ends[-1] for stream in streams} == {"finished"}
            assert saves or not moments or any(stream.resumed for stream in streams)
            turns = await one_more_turn(server.stream_url, streams)
            assert server.stop() == 0
        said = [[event_of_frame(frame) for frame in stream.frames] for stream in streams]
        events = [[event for event in one if event is not None] for one in said]
        values = values_of(store, model, backend, streams)
        results.append((events, turns, [bits(value) for value in values]))
    whole, killed = results
    for kind, left, right in zip(("events", "next turn", "value"), whole, killed, strict=True):
        for body, one, other in zip(BODIES, left, right, strict=True):
            assert one == other, f"{kind} of {body}"


async def test_snapshots_and_the_log_after_them_lead_to_the_same(
    tmp_path: Path, long: bool
) -> None:
    num_tokens, kills = (40_000, range(1, 30_000, 1000)) if long else (4000, KILLS)
    await check_same(tmp_path, 16, num_tokens, kills, "native")


async def test_log_alone_leads_to_the_same(tmp_path: Path) -> None:
    await check_same(tmp_path, 100_000, 200, KILLS, "native")


@pytest.mark.slow
async def test_same_on_torch(tmp_path: Path) -> None:
    """Where the cut of a prompt decides about the last bits."""
    await check_same(tmp_path, 100_000, 200, KILLS[1:], "torch")
