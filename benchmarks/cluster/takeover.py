"""How long a reader of a session waits when its replica is gone: killed, drained, or left.

From the last token that a client had of the old replica to the first one that the new replica
has generated. Clients connect to the other replica at once, and again as our own clients do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import psycopg
from psycopg import sql

from benchmarks.cluster.load import forget_sessions
from benchmarks.cluster.place import Place, place
from benchmarks.cluster.reader import Reader, Times
from benchmarks.process import ServerProcess
from benchmarks.report import Figures
from benchmarks.serve.load import percentile_ms

Kind = Literal["kill", "drain", "leave"]
KINDS: tuple[Kind, ...] = ("kill", "drain", "leave")

ROUND_TIMEOUT_S = 120.0
#: Seconds between two queries of the database while a replica is reclaimed.
LOOK_S = 0.004

#: The parts of a take-over after a kill, in their order.
PARTS = ("lock free", "found dead", "reclaimed", "resumed", "first token")


@dataclass
class TakeOver:
    """What happened to a replica, and what its readers saw of it."""

    kind: Kind
    age: int
    at_s: float
    readers: list[Times]
    seen: dict[str, float] = field(default_factory=dict)

    def waits_s(self) -> list[float]:
        """From the last token of the old replica to the first that the new one made."""
        return [times.fresh_s - times.last_s for times in self.readers]

    def parts_s(self) -> list[list[float]]:
        """For each reader the time that each of `PARTS` took."""
        if not {"free", "reclaiming", "reclaimed"} <= self.seen.keys():
            return []
        ends = [self.seen[name] for name in ("free", "reclaiming", "reclaimed")]
        result = []
        for times in self.readers:
            moments = [self.at_s, *ends, times.resumed_s, times.fresh_s]
            result.append([max(0.0, b - a) for a, b in pairwise(moments)])
        return result


class Replica:
    """A server on the shared store, and its key there."""

    def __init__(self, place: Place, stack: ExitStack) -> None:
        own = stack.enter_context(ExitStack())
        flags = ("--threads", "1", "--store", place.url)
        self.server = own.enter_context(ServerProcess(*flags))
        self.key = int(place.ask(f'SELECT max(key) FROM "{place.schema}".replica'))
        self.end = own.close

    @property
    def port(self) -> int:
        return self.server.port


def measure(options: argparse.Namespace) -> Figures:
    """By kind and number of streams; the kinds take turns, and so do the replicas."""
    result: Figures = {kind: {} for kind in options.kinds}
    with place() as database, ExitStack() as stack:
        old, new = Replica(database, stack), Replica(database, stack)
        for streams, num in zip(options.takeover_streams, options.takeovers, strict=True):
            found: dict[Kind, list[TakeOver]] = {kind: [] for kind in options.kinds}
            for index in range(num):
                age = 1 + int((index + 0.5) * options.save_interval / num)
                for kind, takeovers in found.items():
                    takeovers.append(take_over(kind, old, new, streams, age, database))
                    forget_sessions(new.server.url)
                    old, new = new, old
                    if kind != "leave":
                        new.end()
                        new = Replica(database, stack)
            for kind, takeovers in found.items():
                result[kind][str(streams)] = figures(takeovers)
    return result


def figures(takeovers: Sequence[TakeOver]) -> Figures:
    """How long readers waited, for what, and how it grew with the age of what they read."""
    waits = [wait for one in takeovers for wait in one.waits_s()]
    parts = [own for one in takeovers for own in one.parts_s()]
    of_parts = zip(PARTS, zip(*parts, strict=True), strict=True) if parts else ()
    return {
        "num": len(waits),
        "p50_ms": percentile_ms(waits, 50),
        "p99_ms": percentile_ms(waits, 99),
        "worst_ms": round(1e3 * max(waits), 3),
        "parts_p50_ms": {name: percentile_ms(own, 50) for name, own in of_parts},
        "by_age": {str(one.age): percentile_ms(one.waits_s(), 50) for one in takeovers},
    }


def take_over(
    kind: Kind, old: Replica, new: Replica, streams: int, age: int, place: Place
) -> TakeOver:
    """Does it to ``old`` while ``streams`` read there; returns when all of them continue."""
    with _watched(place, old.key, kind == "kill") as seen:
        done = asyncio.run(_take_over(kind, old, new, streams, age))
    done.seen = seen
    return done


async def _take_over(kind: Kind, old: Replica, new: Replica, streams: int, age: int) -> TakeOver:
    readers = [Reader(number, streams * 10_000 + age, age) for number in range(streams)]
    async with asyncio.timeout(ROUND_TIMEOUT_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(one.run(old.port, new.port, kind == "leave")) for one in readers]
        for reader in readers:
            await reader.is_old.wait()
        at_s = time.perf_counter()
        if kind == "leave":
            for reader in readers:
                reader.leave()
        else:
            os.kill(old.server.pid, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        for reader in readers:
            await reader.is_over.wait()
        for task in tasks:
            task.cancel()
    return TakeOver(kind, age, at_s, [reader.times for reader in readers])


@contextmanager
def _watched(place: Place, key: int, is_wanted: bool) -> Iterator[dict[str, float]]:
    """When the replica's lock was free, another replica began to reclaim it, and had done so."""
    seen: dict[str, float] = {}
    if not is_wanted:
        yield seen
        return
    schema, closed = place.schema, threading.Event()
    assert schema is not None
    thread = threading.Thread(target=_watch, args=(place.url, schema, key, seen, closed))
    thread.start()
    try:
        yield seen
    finally:
        closed.set()
        thread.join()


_LOCKED = """EXISTS (
    SELECT FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'
    AND objid = {key}::oid AND classid = (hashtext({name})::bigint & 4294967295)::oid
)"""
_LOOK = "SELECT NOT {live}, {own}, NOT EXISTS (SELECT FROM {replica} WHERE key = {key})"


def _watch(url: str, schema: str, key: int, seen: dict[str, float], end: threading.Event) -> None:
    locked = sql.SQL(_LOCKED)
    query = sql.SQL(_LOOK).format(
        live=locked.format(key=key, name=f"{schema} live"),
        own=locked.format(key=key, name=schema),
        replica=sql.Identifier(schema, "replica"),
        key=key,
    )
    with psycopg.connect(url, autocommit=True, application_name="benchmark") as connection:
        is_last = False
        while "reclaimed" not in seen and not is_last:
            is_last = end.wait(LOOK_S)  # and one look more: it may have been slower than the rest
            row = connection.execute(query).fetchone()
            now = time.perf_counter()
            assert row is not None
            for name, is_so in zip(("free", "reclaiming", "reclaimed"), row, strict=True):
                if is_so:
                    seen.setdefault(name, now)
    if "reclaimed" in seen:
        seen.setdefault("reclaiming", seen["reclaimed"])
