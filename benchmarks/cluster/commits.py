"""A commit of the store alone: so many sessions get one token each, and it is on the disk.

And a notice from one replica to another.

No server, no model: the store's own code in this process, as the store thread calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from benchmarks.report import Figures
from benchmarks.serve.load import percentile_ms
from server.engine.session import Accepted, Opened, Record, SessionValue
from server.engine.types import Request, SamplingParams, TokenEvent
from server.store.base import Identity, Store
from server.store.postgres.link import SharedPlace
from server.store.postgres.objects import TableObjects
from server.store.postgres.store import PostgresStore
from server.store.sqlite.store import open_store

IDENTITY = Identity("benchmark", "benchmark", "native", "float32", 0, "")
SCHEMA = "everstream_commits"
OWNER = "benchmark"
WARM_UP_COMMITS = 8


def measure(url: str, folder: Path, streams: Sequence[int], num_commits: int) -> Figures:
    """By way and number of sessions; the ways take turns, commit by commit."""
    shared_place = SharedPlace(url, SCHEMA, IDENTITY, TableObjects)
    with (
        closing(open_store(folder, IDENTITY)) as embedded,
        closing(PostgresStore(shared_place)) as shared,
    ):
        ways: dict[str, Store] = {"embedded": embedded, "shared": shared}
        result: Figures = {way: {} for way in ways}
        for num in streams:
            times_s = _times(ways, num, num_commits)
            for way, own in times_s.items():
                result[way][str(num)] = _percentiles(own)
        told_s = [_seconds(lambda: shared.tell(shared.key, "{}")) for _ in range(num_commits)]
        result["notice"] = _percentiles(told_s)
        return result


def _times(ways: dict[str, Store], num: int, num_commits: int) -> dict[str, list[float]]:
    ids = [f"{num}-{index}" for index in range(num)]
    for store in ways.values():
        store.commit([(id, Opened(SessionValue(id, OWNER))) for id in ids])
        store.commit([(id, Accepted(_request(id), (1,), 0, 0)) for id in ids])
    times_s: dict[str, list[float]] = {way: [] for way in ways}
    for seq in range(1, WARM_UP_COMMITS + num_commits + 1):
        records: list[Record] = [(id, TokenEvent("r", seq, seq, 311, " there")) for id in ids]
        for way, store in ways.items():
            times_s[way].append(_seconds(partial(store.commit, records)))
    return {way: own[WARM_UP_COMMITS:] for way, own in times_s.items()}


def _percentiles(times_s: Sequence[float]) -> Figures:
    return {"p50_ms": percentile_ms(times_s, 50), "p99_ms": percentile_ms(times_s, 99)}


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _request(session: str) -> Request:
    return Request("r", OWNER, (1,), SamplingParams(), session, keep=True)
