"""What the shared store costs where its database is some milliseconds away.

The store's own code, as the store thread calls it, on a PostgreSQL of its own behind a
proxy that holds every byte back for half of the round trip. All other work waits for each of
these calls, so that the longest is the pause that every kept stream may have.

    python -m benchmarks.store_latency --output benchmarks/results/store_latency.json
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from benchmarks.report import Figures, Result, command_line
from server.engine.session import Accepted, Opened, Record, Saved, SessionValue, StateBlock
from server.engine.types import Finished, Request, SamplingParams, TokenEvent, Usage
from server.store.base import Identity
from server.store.postgres.link import SharedPlace
from server.store.postgres.objects import TableObjects
from server.store.postgres.store import PostgresStore
from tests.postgres import Postgres
from tests.reliability.proxy import proxied

ROUND_TRIPS_MS = (1, 20, 50, 200)
NUM_SESSIONS, NUM_TURNS, NUM_TOKENS = 16, 3, 20
STATE_BYTES = 64 << 10
IDENTITY = Identity("benchmark", "benchmark", "native", "float32", STATE_BYTES, "")
OWNER = "benchmark"
T = TypeVar("T")
Times = dict[str, list[float]]


class Work:
    """Sessions that have turns at the same time, and the seconds of each call of the store."""

    def __init__(self, store: PostgresStore) -> None:
        self._store, self._now_s = store, 0.0
        self.times: Times = {}
        self.values = [SessionValue(f"s{index}", OWNER) for index in range(NUM_SESSIONS)]

    def run(self) -> Times:
        self._commit("open", [(value.id, Opened(value)) for value in self.values])
        for turn in range(NUM_TURNS):
            self._turn(turn)
        self._each("move", self._store.release)
        self._each("load", lambda id: self._store.load(id, OWNER))
        return self.times

    def _turn(self, turn: int) -> None:
        self._commit("begin", [self._accepted(i, turn) for i in range(NUM_SESSIONS)])
        for _ in range(NUM_TOKENS):
            self._commit("token", [self._token(i, turn) for i in range(NUM_SESSIONS)])
        self._commit("finish", [self._finished(i, turn) for i in range(NUM_SESSIONS)])
        self._commit("save", [self._saved(i) for i in range(NUM_SESSIONS)])
        while self._timed("maintain", self._maintain):
            pass

    def _maintain(self) -> bool:
        self._now_s += 1.0
        return self._store.maintain(self._now_s)

    def _each(self, name: str, call: Callable[[str], object]) -> None:
        for value in self.values:
            self._timed(name, partial(call, value.id))

    def _commit(self, name: str, records: list[Record]) -> None:
        self._timed(name, lambda: self._store.commit(records))

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = call()
        self.times.setdefault(name, []).append(time.perf_counter() - start)
        return result

    # What the engine would say

    def _accepted(self, index: int, turn: int) -> Record:
        value = self.values[index]
        key = f"{value.id}-{turn}"
        request = Request(f"r{turn}", OWNER, (1,), SamplingParams(), value.id, keep=True, key=key)
        entry = Accepted(request, (1,), value.position, value.seq)
        self.values[index] = replace(value, position=value.position + 1)
        return value.id, entry

    def _token(self, index: int, turn: int) -> Record:
        value = self.values[index]
        entry = TokenEvent(f"r{turn}", value.seq + 1, value.position, 311, " there")
        self.values[index] = replace(value, position=value.position + 1, seq=value.seq + 1)
        return value.id, entry

    def _finished(self, index: int, turn: int) -> Record:
        value = self.values[index] = replace(self.values[index], seq=self.values[index].seq + 1)
        usage = Usage(1, NUM_TOKENS)
        end = Finished(f"r{turn}", value.id, value.seq, value.position, "", "length", usage)
        return value.id, end

    def _saved(self, index: int) -> Record:
        state = StateBlock(np.zeros(STATE_BYTES, np.uint8))
        value = self.values[index] = replace(self.values[index], state=state)
        return value.id, Saved(value)


@contextmanager
def delayed(port: int, round_trip_s: float) -> Iterator[int]:
    """The port of a proxy, which runs in a thread of its own."""
    loop, ports, end = asyncio.new_event_loop(), [], asyncio.Event()
    started = threading.Event()

    async def run() -> None:
        async with proxied(port) as proxy:
            proxy.to_server.delay_s = proxy.to_client.delay_s = round_trip_s / 2
            ports.append(proxy.port)
            started.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    started.wait()
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()


def measure(postgres: Postgres, round_trip_ms: int) -> Figures:
    """Median and longest of each call, in milliseconds."""
    url = postgres.new_database()
    with delayed(postgres.port, round_trip_ms / 1000) as port:
        far = url.replace(f":{postgres.port}", f":{port}")
        place = SharedPlace(far, "everstream_latency", IDENTITY, TableObjects)
        with closing(PostgresStore(place)) as store:
            times = Work(store).run()
            start = time.perf_counter()
            with closing(PostgresStore(place)):
                times["join"] = [time.perf_counter() - start]
    return {name: _figures(own) for name, own in times.items()}


def _figures(times_s: list[float]) -> Figures:
    ordered = sorted(times_s)
    median, longest = 1000 * ordered[len(ordered) // 2], 1000 * ordered[-1]
    return {"median_ms": round(median, 1), "max_ms": round(longest, 1)}


def main() -> None:
    """Writes the figures of each round trip."""
    parser = command_line(__doc__)
    result = Result("store_latency", parser.parse_args().output)
    postgres = Postgres(fsync=True)
    postgres.start()
    try:
        found = {str(ms): measure(postgres, ms) for ms in ROUND_TRIPS_MS}
    finally:
        postgres.close()
    result.finish(found)


if __name__ == "__main__":
    main()
