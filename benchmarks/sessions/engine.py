"""What sessions cost in the engine and its store alone, without a server around them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.probe import OWNER, Probe
from benchmarks.sessions.report import Row, times
from model.checkpoint import Checkpoint
from server.engine.session import Past, Saved
from server.models.backend import Backend, open_backend
from server.models.build import load_model
from server.models.storage import identity_of
from server.store.sqlite.store import SqliteStore, open_store

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
        bench.store.close()


class Bench(Probe):
    """An engine with two slots and a store of full durability; every session has read `PROMPT`."""

    def __init__(
        self, backend: Backend, checkpoint: Checkpoint, folder: Path, num_sessions: int
    ) -> None:
        super().__init__(
            backend,
            2,
            max_asleep=num_sessions + 2 * NUM_FORKS,
            session_ttl_s=NEVER_S,
            can_evict=True,
        )
        self._open: Callable[[], SqliteStore] = lambda: open_store(
            folder, identity_of(checkpoint, backend)
        )
        self.store = self._open()
        self._ids = [self.open() for _ in range(num_sessions)]
        for session in self._ids:
            self._append(session)
        self._commit()

    def copies(self, rounds: int) -> list[Row]:
        """Of one session: forks in memory, their entry in the log, and a snapshot."""
        rows = []
        for num in (1, NUM_FORKS):
            copies, commits = [], []
            for _ in range(rounds):
                start = time.perf_counter()
                forks = self.engine.kept.fork(self._ids[0], OWNER, num, 0.0)
                copies.append(time.perf_counter() - start)
                commits.append(_timed(self._commit))
                for fork in forks:
                    self.close(fork.session)
                self._commit()
            rows += [times(f"fork {num}", copies), times("and its commit, synced", commits)]
        return [*rows, *self._snapshots(rounds)]

    def _snapshots(self, rounds: int) -> list[Row]:
        values, commits, files = [], [], []
        for number in range(rounds):
            self._append(self._ids[0])
            self._commit()
            start = time.perf_counter()
            value = self.engine.kept.value(self._ids[0], OWNER)
            values.append(time.perf_counter() - start)
            record = (self._ids[0], Saved(value))
            commits.append(_timed(lambda record=record: self.store.commit([record])))
            files.append(_timed(lambda now=number: self.store.maintain(float(now))))
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
        self.engine.expire(2 * NEVER_S)
        self._commit()
        self.store.close()
        evicted_s = (time.perf_counter() - start) / len(self._ids)
        self.store = self._open()
        loads = [_timed(lambda id=id: self._restore(id)) for id in self._ids]
        return [
            times("a token's turn in a slot, state at hand", again),
            times("a token's turn in a slot, one state out and one in", turns),
            times("hibernate: memory to disk, synced, each of all", [evicted_s]),
            times("wake: disk to memory", loads),
        ]

    def _restore(self, session: str) -> None:
        loaded = self.store.load(session, OWNER)
        self.engine.kept.restore(Past(loaded.value, loaded.entries), 2 * NEVER_S)

    def _append(self, session: str, tokens: Sequence[int] = PROMPT) -> None:
        self.submit(session, tokens)
        self.drain()

    def _commit(self) -> None:
        if records := self.engine.take_records():
            self.store.commit(records)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
