"""A script of commits that uses everything of a store, and what a store must know after it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import pytest

from server.engine.session import Deleted, Opened, Record
from server.errors import SessionNotFound
from server.store.base import Store, StoreError, StoreFailed, StoreFull
from server.store.table_store import StoreLimits
from tests.server.store.faults import Faults
from tests.server.store.records import Writer, block, text_after

LIMITS = StoreLimits(max_snapshots=4, max_log_tokens=60)


def ticks() -> Iterator[tuple[list[Record], bool]]:
    """Commits, and whether the store is maintained after each."""
    one, two, copy, brief = Writer("one"), Writer("two"), Writer("copy"), Writer("brief")
    yield [one.opened(), two.opened()], False
    yield [one.accepted(), two.accepted(key="k")], False
    yield [one.token(), two.token()], True
    yield [one.token(), one.saved(), two.token()], True
    yield [copy.opened(block(4), (1, 2, 102, 103)), brief.opened(block(9), tuple(range(9)))], False
    yield [one.token(), two.finished(), *copy.turn(3), copy.saved(evicted=True)], True
    yield [one.finished(), one.rewound(3), brief.deleted()], True
    for turn in range(3):
        yield [*one.turn(9), one.saved(), two.accepted(key=f"k{turn}"), two.token()], True
        yield [*two.tokens(4), two.saved(), two.finished()], True


class Script:
    """The commits, and what a store must know after those that have returned."""

    def __init__(self) -> None:
        self.logs: dict[str, list[Record]] = {}

    def run(self, store: Store, faults: Faults, done: Callable[[], object] = lambda: None) -> None:
        """A tick that fails is given again once the disk works, as a client would.

        ``done`` is called after each call of the store's.
        """
        now_s = 0.0
        for records, maintained in ticks():
            self._commit(store, records, faults)
            done()
            now_s += 1
            if maintained:
                try:
                    store.maintain(now_s)
                except StoreError:
                    faults.heal()
                    self.check(store)
                done()

    def _commit(self, store: Store, records: list[Record], faults: Faults) -> None:
        kinds: set[type[StoreError]] = set()
        try:
            store.commit(records)
        except StoreError as error:
            kinds.add(type(error))
            faults.heal()
            self.check(store)  # nothing of it counts
            store.commit(records)
        assert kinds <= {StoreFull if faults.code == errno.ENOSPC else StoreFailed}
        for id, entry in records:
            if isinstance(entry, Opened):
                self.logs[id] = []
            self.logs[id].append((id, entry))
            if isinstance(entry, Deleted):
                del self.logs[id]
        try:
            self.check_lengths(store)
        except StoreError:
            faults.heal()
            self.check_lengths(store)

    def check_lengths(self, store: Store) -> None:
        listed = {each.id: (each.length, each.seq) for each in store.list(None, None, 9)}
        assert listed == {id: self._end(id) for id in self.logs}

    def _end(self, id: str) -> tuple[int, int]:
        length = seq = 0
        for _, entry in self.logs[id]:
            if isinstance(entry, Opened):
                length = entry.value.length
            length = len(text_after(length, [entry]))
            seq = getattr(entry, "seq", seq)
        return length, seq

    def check(self, store: Store) -> None:
        """All that was committed, and nothing else."""
        self.check_lengths(store)
        for id, log in self.logs.items():
            loaded = store.load(id, "ann")
            entries = [entry for _, entry in log if not isinstance(entry, Opened)]
            length = loaded.value.length
            assert len(text_after(length, loaded.entries)) == self._end(id)[0]
            tail = [entry for entry in entries if type(entry).__name__ not in ("Saved", "Rewound")]
            same = [entry for entry in loaded.entries if type(entry).__name__ != "Rewound"]
            assert same == tail[len(tail) - len(same) :]
            if loaded.value.state is not None:
                assert bytes(loaded.value.state.data) == bytes(block(loaded.value.position).data)
        with pytest.raises(SessionNotFound):
            store.load("never", "ann")
