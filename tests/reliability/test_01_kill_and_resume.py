"""1: kill -9 at random moments. No client misses a token, sees one twice, or sees another one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from model.tensor_spec import StateDType
from tests.chaos.report import as_markdown
from tests.chaos.run import Plan, chaos
from tests.chosen_model import served_model
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.servers import DRAFTING, EVERSTREAM, ServerProcess
from tests.reliability.soloist import check_alone
from tests.reliability.streams import KeptStream, log_of_store, log_over_http, run_all
from tests.requirements import needs_native
from tests.tiny import write_model_with_head

SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True}
ACCEPTED = "everstream_draft_tokens_total", "accepted"
PROMPT = "Once upon a time number {} met a fox. "


@dataclass(frozen=True)
class Form:
    num_kills: int
    num_sessions: int
    num_tokens: int

    def kills(self, seed: int) -> list[int]:
        """How many tokens all clients together have seen at each kill, the last one early enough.

        Some in the moment in which the clients come back.
        """
        chance = random.Random(seed)
        latest = self.num_sessions * self.num_tokens * 9 // 10
        return sorted(
            chance.choice((chance.randrange(latest), chance.randrange(10)))
            for _ in range(self.num_kills)
        )


async def survive(
    server: ServerProcess,
    streams: list[KeptStream],
    odometer: Odometer,
    kills: list[int],
    counts: Counter[str] | None,
) -> None:
    """Kills the server when the clients have seen so many tokens; each time they come back.

    The drafts that were ``accepted`` by all its processes are added to ``counts``.
    """
    for num_tokens in kills:
        odometer.hold_at(num_tokens)
        running = asyncio.create_task(run_all(streams, server.stream_url))
        await odometer.reach(num_tokens)
        if counts is not None:
            counts["accepted"] += int((await asyncio.to_thread(server.gauges))[ACCEPTED])
        server.kill()
        await odometer.release()
        await running
        await asyncio.to_thread(server.start)
    await run_all(streams, server.stream_url)
    if counts is not None:
        counts["accepted"] += int((await asyncio.to_thread(server.gauges))[ACCEPTED])


async def prove(
    form: Form,
    seed: int,
    store: Path,
    model: Path | None,
    *flags: str,
    program: tuple[str, ...] = EVERSTREAM,
    counts: Counter[str] | None = None,
    state_dtype: StateDType = "float32",
    **sampling: Any,
) -> None:
    history, odometer = History(), Odometer()
    body = {"max_tokens": form.num_tokens, **SAMPLING, **sampling}
    streams = [
        KeptStream(f"c{seed}", history, odometer, prompt=PROMPT.format(seed), seed=seed, **body)
        for seed in range(form.num_sessions)
    ]
    where = () if model is None else ("--model", str(model))
    environment = {"EVERSTREAM_SAVE_INTERVAL_TOKENS": "64"}
    flags = ("--store", str(store), "--state-dtype", state_dtype, *where, *flags)
    with ServerProcess(*flags, program=program, environment=environment) as server:
        await survive(server, streams, odometer, form.kills(seed), counts)
        assert {stream.ends[-1] for stream in streams} == {"finished"}
        # Each kill held a client that had been answered since it was held before.
        assert sum(len(stream.resumed) for stream in streams) >= form.num_kills
        told = await log_over_http(server.url, [stream.session for stream in streams])
        assert server.stop() == 0
    kept = log_of_store(store, model)
    assert told == kept
    assert len(kept) == form.num_sessions, "a session was begun twice"
    check_alone(streams, history, kept, model, state_dtype)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("durability", ["full", "relaxed"])
async def test_every_transcript_is_whole_after_kills_at_random_moments(
    durability: str, tmp_path: Path, long: bool
) -> None:
    short = Form(6, 24, 400) if durability == "full" else Form(3, 24, 200)
    form = Form(100, 200, 2000) if long else short
    model = served_model(tmp_path / "model")
    await prove(form, 1, tmp_path / "store", model, "--durability", durability)


async def test_every_transcript_of_the_bundled_model_is_whole_after_kills(
    tmp_path: Path, long: bool
) -> None:
    form = Form(10, 24, 600) if long else Form(2, 6, 200)
    await prove(form, 2, tmp_path / "store", None)


@needs_native
async def test_every_transcript_is_whole_after_kills_where_states_are_rounded(
    tmp_path: Path,
) -> None:
    model = served_model(tmp_path / "model")
    await prove(Form(3, 8, 200), 4, tmp_path / "store", model, state_dtype="bfloat16")


@needs_native
async def test_every_transcript_is_whole_after_kills_while_drafts_are_checked(
    tmp_path: Path, long: bool
) -> None:
    """The texts are loops, which drafts find, of few enough streams to get any.

    What is accepted between the last look at a server's metrics and its end is not counted.
    """
    form = Form(40, 8, 2000) if long else Form(4, 6, 400)
    model = served_model(tmp_path / "model")
    counts: Counter[str] = Counter()
    store = tmp_path / "store"
    await prove(form, 3, store, model, program=DRAFTING, counts=counts, temperature=0.0)
    assert counts["accepted"] > 0


@needs_native
async def test_every_transcript_is_whole_after_kills_while_a_head_drafts(
    tmp_path: Path, long: bool
) -> None:
    """What it had read of a text before a kill is gone after it."""
    form = Form(40, 8, 400) if long else Form(4, 6, 200)
    model = write_model_with_head(tmp_path / "model")
    counts: Counter[str] = Counter()
    await prove(form, 5, tmp_path / "store", model, program=DRAFTING, counts=counts)
    assert counts["accepted"] > 0


@pytest.mark.database
@pytest.mark.timeout(900)
async def test_every_transcript_is_whole_after_kills_of_replicas(long: bool) -> None:
    """Sockets and server-sent events; one replica at a time, and all of them at once."""
    num_faults, num_clients = (40, 100) if long else (3, 24)
    plan = Plan(
        seed=11,
        seconds=600,
        num_clients=num_clients,
        kinds=["kill", "kill", "kill", "kill all"],
        max_faults=num_faults,
        wires="direct",
    )
    verdict = await chaos(plan)
    assert verdict.is_good, as_markdown(verdict)
    assert len(verdict.faults) == num_faults
    assert verdict.waits.seconds["kill"], "no reader met a kill"
