"""So many kept streams at once on one replica or several: tokens, and what each part spent on them.

Streams have prompts of different lengths, so that their states are saved at different times, as
those of real users are. The load generator counts tokens and looks at nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx
import orjson

from benchmarks.cluster.place import Place, Work
from benchmarks.machine import thread_seconds
from benchmarks.process import ServerProcess
from benchmarks.report import Figures
from benchmarks.serve.load import percentile_ms
from benchmarks.websocket import TEXT, frame, handshake
from benchmarks.wire import Counter, Frame, Opening, connect

#: Ids that exist in the bundled model's vocabulary, and are not special tokens.
PROMPT_IDS = range(300, 4000)
MAX_TOKENS = 1_000_000
#: Of each stream, before anything is counted.
WARM_UP_TOKENS = 12
WARM_UP_TIMEOUT_S = 120.0
#: So a stream without a reader costs nothing.
FLAGS = ("--threads", "1", "--max-detached-tokens", "0")


class _Sample(NamedTuple):
    """Running totals of everything but the streams."""

    seconds: float
    tokens: int
    servers_s: float
    load_s: float
    work: Work


def messages(streams: int, seed: int, save_interval: int) -> list[Frame]:
    """A kept generation that does not end by itself, for each stream."""
    draw, each = random.Random(seed), max(1, save_interval // streams)
    lengths = [1 + index * each + draw.randrange(each) for index in range(streams)]
    return [
        {
            "type": "generate",
            "request_id": "r",
            "prompt": draw.choices(PROMPT_IDS, k=length),
            "keep": True,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": seed * 1000 + index,
        }
        for index, length in enumerate(lengths)
    ]


def load(
    servers: Sequence[ServerProcess],
    place: Place,
    streams: int,
    seed: int,
    options: argparse.Namespace,
) -> Figures:
    """The figures of one load on ``servers``; the sessions are deleted after it."""
    try:
        return asyncio.run(_load(servers, place, streams, seed, options))
    finally:
        for server in servers:
            forget_sessions(server.url)


async def _load(
    servers: Sequence[ServerProcess],
    place: Place,
    streams: int,
    seed: int,
    options: argparse.Namespace,
) -> Figures:
    flowing = [
        Counter(Opening(handshake(), frame(TEXT, orjson.dumps(message))))
        for message in messages(streams, seed, options.save_interval)
    ]
    ports = [server.port for server in servers]
    pids = [server.pid for server in servers]
    try:
        for stream, port in zip(flowing, itertools.cycle(ports)):
            await connect(stream, port)
        await _warm_up(flowing)
        for stream in flowing:
            stream.gaps_s.clear()
        before = _sample(pids, place, flowing)
        await asyncio.sleep(options.seconds)
        after = _sample(pids, place, flowing)
        _check(flowing)
    finally:
        for stream in flowing:
            stream.abort()
    return _figures(before, after, [gap for stream in flowing for gap in stream.gaps_s])


async def _warm_up(flowing: Sequence[Counter]) -> None:
    """Returns when each stream flows."""
    async with asyncio.timeout(WARM_UP_TIMEOUT_S):
        while any(stream.num_tokens < WARM_UP_TOKENS for stream in flowing):
            _check(flowing)
            await asyncio.sleep(0.05)


def _check(flowing: Sequence[Counter]) -> None:
    if any(stream.ended for stream in flowing):
        raise SystemExit("a stream has ended")


def _sample(pids: Sequence[int], place: Place, flowing: Sequence[Counter]) -> _Sample:
    work = place.work()
    return _Sample(
        time.perf_counter(),
        sum(stream.num_tokens for stream in flowing),
        sum(sum(thread_seconds(pid).values()) for pid in pids),
        time.process_time(),
        work,
    )


def _figures(before: _Sample, after: _Sample, gaps_s: Sequence[float]) -> Figures:
    seconds, tokens = after.seconds - before.seconds, after.tokens - before.tokens
    work = after.work.since(before.work)
    return {
        "tokens_per_s": round(tokens / seconds, 1),
        "inter_token_p50_ms": percentile_ms(gaps_s, 50),
        "inter_token_p99_ms": percentile_ms(gaps_s, 99),
        "server_us_per_token": round(1e6 * (after.servers_s - before.servers_s) / tokens, 1),
        "database_us_per_token": round(1e6 * work.cpu_s / tokens, 1),
        "load_us_per_token": round(1e6 * (after.load_s - before.load_s) / tokens, 1),
        "commits_per_s": round(work.commits / seconds, 1),
        "tokens_per_commit": round(tokens / work.commits, 2) if work.commits else None,
        "wal_bytes_per_token": round(work.wal_bytes / tokens, 1),
    }


def forget_sessions(url: str) -> None:
    """Deletes every session that there is."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        while sessions := client.get("/v1/sessions?limit=1000").raise_for_status().json()["data"]:
            for session in sessions:
                client.delete(f"/v1/sessions/{session['session']}").raise_for_status()
