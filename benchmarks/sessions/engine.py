"""What sessions cost in the engine and its store alone, without a server around them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.sessions.report import Row, times
from model.checkpoint import Checkpoint
from server.engine.engine import Engine, EngineConfig
from server.engine.types import Request
from server.engine.value import Past, Saved
from server.models.backend import Backend, open_backend
from server.models.factory import load_model
from server.models.storage import identity_of
from server.store.sqlite.store import SqliteStore, open_store

OWNER = "benchmark"
PROMPT = tuple(range(300, 364))
NUM_FORKS = 64
NEVER_S = 1e9


def measure(folder: Path, num_sessions: int, rounds: int) -> list[Row]:
    """Forks, snapshots, and ``num_sessions`` on their way to the disk and back."""
    checkpoint = load_model(None)
    backend = open_backend(checkpoint, "auto", "auto", 1)
    bench = Bench(backend, checkpoint, folder / "engine", num_sessions)
    try:
        return [*bench.copies(rounds), *bench.sleep_and_wake()]
    finally:
        bench.close()


class Bench:
    """An engine with two slots and a store of full durability; every session has read `PROMPT`."""

    def __init__(
        self, backend: Backend, checkpoint: Checkpoint, folder: Path, num_sessions: int
    ) -> None:
        names = itertools.count()
        config = EngineConfig(
            new_id=lambda: f"session-{next(names)}",
            max_asleep=num_sessions + 2 * NUM_FORKS,
            session_ttl_s=NEVER_S,
            can_evict=True,
        )
        self._engine: Engine = backend.engine(2, config)
        self._open: Callable[[], SqliteStore] = lambda: open_store(
            folder, identity_of(checkpoint, backend)
        )
        self._store = self._open()
        self._requests = itertools.count()
        self._ids = [self._engine.create_session(OWNER, 0.0).session for _ in range(num_sessions)]
        for session in self._ids:
            self._append(session)
        self._commit()

    def close(self) -> None:
        """Gives the store back."""
        self._store.close()

    def copies(self, rounds: int) -> list[Row]:
        """Of one session: forks in memory, their entry in the log, and a snapshot."""
        rows = []
        for num in (1, NUM_FORKS):
            copies, commits = [], []
            for _ in range(rounds):
                start = time.perf_counter()
                forks = self._engine.fork(self._ids[0], OWNER, num, 0.0)
                copies.append(time.perf_counter() - start)
                commits.append(_timed(self._commit))
                for fork in forks:
                    self._engine.delete_session(fork.session, OWNER)
                self._commit()
            rows += [times(f"fork {num}", copies), times("and its commit, synced", commits)]
        return [*rows, *self._snapshots(rounds)]

    def _snapshots(self, rounds: int) -> list[Row]:
        values, commits, files = [], [], []
        for number in range(rounds):
            self._append(self._ids[0])
            self._commit()
            start = time.perf_counter()
            value = self._engine.value(self._ids[0], OWNER)
            values.append(time.perf_counter() - start)
            record = (self._ids[0], Saved(value))
            commits.append(_timed(lambda record=record: self._store.commit([record])))
            files.append(_timed(lambda now=number: self._store.maintain(float(now))))
        return [
            times("snapshot: copy of the state", values),
            times("snapshot: its entry in the log", commits),
            times("snapshot: its file, synced", files),
        ]

    def sleep_and_wake(self) -> list[Row]:
        """All sessions from slot to memory, to the disk, and back again."""
        one = PROMPT[:1]
        turns = [_timed(lambda id=id: self._append(id, one)) for id in self._ids]
        again = [_timed(lambda: self._append(self._ids[-1], one)) for _ in self._ids]
        self._commit()
        start = time.perf_counter()
        self._engine.expire(2 * NEVER_S)
        self._commit()
        self._store.close()
        evicted_s = (time.perf_counter() - start) / len(self._ids)
        self._store = self._open()
        loads = [_timed(lambda id=id: self._restore(id)) for id in self._ids]
        return [
            times("a token's turn in a slot, state at hand", again),
            times("a token's turn in a slot, one state out and one in", turns),
            times("hibernate: memory to disk, synced, each of all", [evicted_s]),
            times("wake: disk to memory", loads),
        ]

    def _restore(self, session: str) -> None:
        loaded = self._store.load(session, OWNER)
        self._engine.restore(Past(loaded.value, loaded.entries), 2 * NEVER_S)

    def _append(self, session: str, tokens: tuple[int, ...] = PROMPT) -> None:
        request = Request(f"r{next(self._requests)}", OWNER, tokens, None, session, True)
        self._engine.submit(request, 0.0)
        while self._engine.has_work():
            self._engine.step(0.0)

    def _commit(self) -> None:
        if records := self._engine.take_records():
            self._store.commit(records)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
