"""Any history, with deaths anywhere in it: the store knows what its sessions' writers know."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.types import Finished, TokenEvent
from server.engine.value import Record
from server.store.saving import StoreLimits
from server.store.sqlite.check import problems
from server.store.sqlite.store import SqliteStore, open_store
from tests.server.store.records import IDENTITY, Writer, block, text_after

#: What a session can do next: (may it, the records of it), by name.
Move = Callable[[Writer], list[Record]]
IDLE: dict[str, Move] = {
    "begin": lambda w: [w.accepted(request_id=f"r{len(w.entries)}", key=f"{w.id}{w.value.seq}")],
    "turn": lambda w: w.turn(5),
    "feed": lambda w: [w.accepted(feeds_only=True), w.finished(None)],
    "rewind": lambda w: [w.rewound(max(w.origin, len(w.text) // 2))],
    "save": lambda w: [w.saved()],
    "evict": lambda w: [w.saved(evicted=True)],
}
BUSY: dict[str, Move] = {
    "token": lambda w: [w.token()],
    "many": lambda w: w.tokens(300),
    "end": lambda w: [w.finished()],
    "save": lambda w: [w.saved()],
    "evict": lambda w: [w.saved(evicted=True)],
}
ACTIONS = sorted({*IDLE, *BUSY, "new", "fork", "delete", "maintain", "die", "close"})


class History:
    """A store, and the sessions that ought to be in it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_lives, self._num_sessions, self._now_s = folder, 0, 0, 0.0
        self._sessions: list[Writer] = []
        self.store = self._open()

    def _open(self) -> SqliteStore:
        limits = StoreLimits(max_snapshots=5)
        return open_store(self.path, IDENTITY, "relaxed", limits=limits)

    @property
    def path(self) -> Path:
        return self._folder / str(self._num_lives)

    def act(self, action: str, which: int) -> None:
        if action in ("new", "fork"):
            self._num_sessions += 1
            self._sessions.append(Writer(f"s{self._num_sessions}"))
            fork = (block(4), (1, 2, 3, 4)) if action == "fork" else (None, ())
            self.store.commit([self._sessions[-1].opened(*fork)])
        elif action == "maintain":
            self._now_s += 1
            self.store.maintain(self._now_s)
        elif action == "die":
            old, store = self.path, self.store
            self._num_lives += 1
            shutil.copytree(old, self.path)
            self.store = self._open()
            store.close()
        elif action == "close":
            self.store.close()
            self.store = self._open()
        elif self._sessions:
            self._move(action, self._sessions[which % len(self._sessions)])

    def _move(self, action: str, writer: Writer) -> None:
        moves = IDLE if writer.value.progress is None else BUSY
        if action in moves:
            self.store.commit(moves[action](writer))
        elif action == "delete":
            self.store.commit([writer.deleted()])
            self._sessions.remove(writer)

    def check(self) -> None:
        listed = {each.id: each for each in self.store.list(None, None, 99)}
        assert listed.keys() == {writer.id for writer in self._sessions}
        for writer in self._sessions:
            value, seen = writer.value, listed[writer.id]
            running = value.progress is not None
            assert (seen.epoch, seen.length, seen.seq, seen.unfinished) == (
                *(value.epoch, len(writer.text), value.seq, running),
            )
            self._check_log(writer)
        running_ids = {w.id for w in self._sessions if w.value.progress is not None}
        assert {id for id, _ in self.store.unfinished()} == running_ids

    def _check_log(self, writer: Writer) -> None:
        events = [
            entry
            for entry in writer.entries
            if isinstance(entry, TokenEvent)
            or (isinstance(entry, Finished) and entry.finish_reason is not None)
        ]
        assert self.store.read(writer.id, "ann", 0, 10_000) == events
        for at in (None, max(writer.origin, len(writer.text) // 2), len(writer.text)):
            loaded = self.store.load(writer.id, "ann", at)
            reached = text_after(loaded.value.length, loaded.entries)
            wanted = writer.text[:at]
            assert len(reached) >= len(wanted)
            assert all(a in (None, b) for a, b in zip(reached, wanted, strict=False))
            if loaded.value.state is not None:
                assert bytes(loaded.value.state.data) == bytes(block(loaded.value.position).data)


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_store_knows_what_happened(actions: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder))
        for action, which in actions:
            history.act(action, which)
            if action in ("die", "close", "maintain"):
                history.check()
        history.check()
        history.store.close()
        assert list(problems(history.path)) == []
