"""Random commits on a store in memory, a store on disk, and plain lists: all three know the same.

The one on disk dies now and then, by being left behind or copied as it is, and
nothing that was committed may be missing from what is opened after it.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from model.tokenizer import Tokenizer
from server.engine.detokenizer import Detokenizer
from server.engine.errors import SessionNotFound
from server.engine.replay import replay
from server.engine.sessions import Session
from server.engine.types import Finished, FinishReason, TokenEvent
from server.engine.value import Record
from server.store.base import Events, Keyed, Store
from server.store.check import problems
from server.store.errors import Fenced, HistoryGone
from server.store.lock import Waiting
from server.store.memory_store import MemoryStore
from server.store.sqlite_store import SqliteStore, open_store
from server.store.upkeep import Limits
from tests.server.store.records import IDENTITY, Writer, block

MAX_SNAPSHOTS = 4
OWNERS = ("ann", "bob")
#: A tail of some hundred entries leaves the journal.
COUNTS = st.sampled_from([1, 2, 9, 270])


Wanted = Callable[["Story"], bool]


class OneLetter:
    """Every token is an x: what the tokens say is of no interest here."""

    def token_bytes(self, id: int) -> bytes:
        return b"x"


class Story(Writer):
    """A session as lists: its text, and the events that it has sent, one for each number."""

    def __init__(self, id: str, owner: str) -> None:
        super().__init__(id, owner)
        self.events: Events = []
        self.cut: int | None = None  # where the running request may still be cut back to

    def accepted(self, *args: object, **options: object) -> Record:
        self.cut = len(self.text)
        return super().accepted(*args, **options)  # type: ignore[arg-type]

    def token(self, text: str = "x") -> Record:
        record = super().token(text)
        progress = self.value.progress
        assert isinstance(record[1], TokenEvent)
        assert progress is not None
        progress = replace(progress, num_generated=progress.num_generated + 1)
        self.value, self.cut = replace(self.value, progress=progress), None
        self.events.append(record[1])
        return record

    def saved(self, *, evicted: bool = False) -> Record:
        self.cut = None
        return super().saved(evicted=evicted)

    def cancelled(self) -> Record:
        """Within its prompt, where that is not over."""
        if self.cut is not None:
            del self.text[self.cut + 1 :]
            self.value = replace(self.value, position=len(self.text))
        return self.finished("cancelled")

    def finished(self, reason: FinishReason | None = "stop") -> Record:
        assert self.value.progress is not None
        feeds_only = self.value.progress.request.sampling is None
        record = super().finished(None if feeds_only and reason == "stop" else reason)
        assert isinstance(record[1], Finished)
        if not feeds_only:
            self.events.append(record[1])
        return record


class StoreMachine(RuleBasedStateMachine):
    """What an engine and its clients do; some records wait for later ones of their tick."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.names, self.now_s, self.num_lives = itertools.count(1), 0.0, 0
        self.memory = MemoryStore(durable=True, max_snapshots=MAX_SNAPSHOTS)
        self.disk = self.open_disk()
        self.left: list[SqliteStore] = []
        self.stories: dict[str, Story] = {}
        self.keys: dict[tuple[str, str], Keyed] = {}
        self.tick: list[Record] = []

    def open_disk(self) -> SqliteStore:
        limits, waiting = Limits(max_snapshots=MAX_SNAPSHOTS), Waiting(lease_s=0.0)
        return open_store(self.path, IDENTITY, "relaxed", limits=limits, waiting=waiting)

    @property
    def path(self) -> Path:
        return self.folder / str(self.num_lives)

    @property
    def stores(self) -> tuple[Store, Store]:
        return self.memory, self.disk

    def commit(self, records: Sequence[Record], waits: bool) -> None:
        self.tick += records
        if waits:
            return
        for store in self.stores:
            store.commit(list(self.tick))
        self.tick = []

    # Sessions

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.open("ann", waits=False)
        self.accept(data, length=2, feeds_only=False, has_key=True)

    @rule(owner=st.sampled_from(OWNERS), waits=st.booleans())
    def open(self, owner: str, waits: bool) -> None:
        self.commit([self.new(owner).opened()], waits)

    @precondition(lambda self: any(story.text for story in self.stories.values()))
    @rule(data=st.data(), num=st.integers(1, 3), waits=st.booleans())
    def fork(self, data: st.DataObject, num: int, waits: bool) -> None:
        """Copies that share a state."""
        old = self.one(data, lambda story: bool(story.text))
        text = tuple(old.text[: data.draw(st.integers(1, len(old.text)))])
        state = block(len(text))
        copies = [self.new(old.value.owner) for _ in range(num)]
        self.commit([copy.opened(state, text) for copy in copies], waits)

    @precondition(lambda self: self.stories)
    @rule(data=st.data(), waits=st.booleans())
    def delete(self, data: st.DataObject, waits: bool) -> None:
        story = self.one(data)
        del self.stories[story.id]
        self.commit([story.deleted()], waits)

    @precondition(lambda self: self.stories)
    @rule(data=st.data(), evicted=st.booleans(), waits=st.booleans())
    def save(self, data: st.DataObject, evicted: bool, waits: bool) -> None:
        self.commit([self.one(data).saved(evicted=evicted)], waits)

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), waits=st.booleans())
    def rewind(self, data: st.DataObject, waits: bool) -> None:
        story = self.one(data, is_idle)
        length = data.draw(st.integers(story.origin, len(story.text)))
        self.commit([story.rewound(length)], waits)

    # Requests

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), length=COUNTS, feeds_only=st.booleans(), has_key=st.booleans())
    def accept(self, data: st.DataObject, length: int, feeds_only: bool, has_key: bool) -> None:
        story = self.one(data, is_idle)
        name = f"r{next(self.names)}"
        key, first_seq, start = (name if has_key else None), story.value.seq, len(story.text)
        tokens = tuple(range(length))
        record = story.accepted(tokens, request_id=name, key=key, feeds_only=feeds_only)
        if key is not None:
            kept = Keyed(story.id, name, first_seq, start, None, feeds_only)
            self.keys[story.value.owner, key] = kept
        self.commit([record], waits=False)

    @precondition(lambda self: self.generating())
    @rule(data=st.data(), count=COUNTS, waits=st.booleans())
    def generate(self, data: st.DataObject, count: int, waits: bool) -> None:
        self.commit(self.one(data, is_generating).tokens(count), waits)

    @precondition(lambda self: self.generating())
    @rule(waits=st.booleans())
    def generate_all(self, waits: bool) -> None:
        """A tick as it is under load: a token for everybody."""
        self.commit([story.token() for story in self.generating()], waits)

    @precondition(lambda self: len(self.idle()) < len(self.stories))
    @rule(data=st.data(), is_cancelled=st.booleans(), waits=st.booleans())
    def finish(self, data: st.DataObject, is_cancelled: bool, waits: bool) -> None:
        story = self.one(data, lambda story: not is_idle(story))
        progress = story.value.progress
        assert progress is not None
        record = story.cancelled() if is_cancelled else story.finished()
        name = (story.value.owner, progress.request.key or "")
        if name in self.keys:
            assert isinstance(record[1], Finished)
            self.keys[name] = replace(self.keys[name], finished=record[1])
        self.commit([record], waits)

    # The life of a store

    @rule(seconds=st.sampled_from([0.0, 1.0, 100.0]))
    def maintain(self, seconds: float) -> None:
        self.now_s += seconds
        for store in self.stores:
            store.maintain(self.now_s)

    @rule()
    def close_and_open(self) -> None:
        self.disk.close()
        self.disk = self.open_disk()

    @rule()
    def leave_and_open(self) -> None:
        """The owner hangs, and another one takes over."""
        old = self.disk
        self.disk = self.open_disk()
        with pytest.raises(Fenced):
            old.maintain(self.now_s)
        self.left.append(old)

    @rule()
    def kill_and_open(self) -> None:
        """What is on the disk at this moment is all that there is."""
        old, dead = self.path, self.disk
        self.num_lives += 1
        shutil.copytree(old, self.path)
        self.disk = self.open_disk()
        dead.close()

    # What all know

    @invariant()
    def lists_agree(self) -> None:
        if self.tick:
            return
        wanted = sorted(
            (s.id, s.value.owner, s.value.epoch, len(s.text), s.value.seq, not is_idle(s))
            for s in self.stories.values()
        )
        running = [(id, owner) for id, owner, *_, is_running in wanted if is_running]
        for store in self.stores:
            found = store.list(None, None, 10_000)
            assert [
                (s.id, s.owner, s.epoch, s.length, s.seq, s.unfinished) for s in found
            ] == wanted
            assert sorted(store.unfinished()) == sorted(running)
            for owner in OWNERS:
                own = [each for each in found if each.owner == owner]
                assert store.list(owner, None, 10_000) == own
                assert store.stored_bytes(owner) == sum(each.stored_bytes for each in own)
                half = len(own) // 2
                if half:
                    assert store.list(owner, own[half - 1].id, 2) == own[half : half + 2]

    @invariant()
    def keys_agree(self) -> None:
        if self.tick:
            return
        for store in self.stores:
            for (owner, key), kept in self.keys.items():
                assert store.find_key(owner, key) == kept
                assert store.find_key("ann" if owner == "bob" else "bob", key) is None

    @precondition(lambda self: self.stories and not self.tick)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        story = self.one(data)
        lengths = st.integers(0, len(story.text) + 2)
        after, at = data.draw(st.integers(0, story.value.seq + 1)), data.draw(lengths)
        max_events = data.draw(st.sampled_from([1, 10, 1000]))
        for store in self.stores:
            check_events(store, story, after, max_events)
            check_past(store, story, at)

    def teardown(self) -> None:
        try:
            self.commit([], waits=False)
            self.lists_agree()
            self.keys_agree()
            for store in self.stores:
                for story in self.stories.values():
                    check_events(store, story, 0, 100_000)
                    check_past(store, story, None)
                    check_past(store, story, len(story.text) // 2)
            self.disk.close()
            assert list(problems(self.path)) == []
        finally:
            for store in (*self.left, self.disk):
                store.close()
            shutil.rmtree(self.folder)

    # Inside

    def new(self, owner: str) -> Story:
        story = Story(f"s{next(self.names)}", owner)
        self.stories[story.id] = story
        return story

    def one(self, data: st.DataObject, is_wanted: Wanted = lambda story: True) -> Story:
        ids = [id for id, story in self.stories.items() if is_wanted(story)]
        return self.stories[data.draw(st.sampled_from(sorted(ids)))]

    def idle(self) -> list[Story]:
        return [story for story in self.stories.values() if is_idle(story)]

    def generating(self) -> list[Story]:
        return [story for story in self.stories.values() if is_generating(story)]


def is_idle(story: Story) -> bool:
    return story.value.progress is None


def is_generating(story: Story) -> bool:
    progress = story.value.progress
    return progress is not None and progress.request.sampling is not None


def check_events(store: Store, story: Story, after: int, max_events: int) -> None:
    wanted = [event for event in story.events if event.seq > after][:max_events]
    assert store.read(story.id, story.value.owner, after, max_events) == wanted
    with pytest.raises(SessionNotFound):
        store.read(story.id, "eve", after, max_events)


def check_past(store: Store, story: Story, at: int | None) -> None:
    """What an engine makes of it is the text, up to ``at`` tokens of it."""
    if at is not None and at < story.origin:
        with pytest.raises(HistoryGone):
            store.load(story.id, story.value.owner, at)
        return
    loaded = store.load(story.id, story.value.owner, at)
    value = loaded.value
    if value.position:
        assert value.state is not None
        assert value.state.data.tobytes() == block(value.position).data.tobytes()
    session = Session.of(value, Detokenizer(cast(Tokenizer, OneLetter())), 0.0)
    progress = replay(session, value.progress, loaded.entries, at)
    text = story.text[:at]
    assert session.next(session.length - session.position) == text[value.length :]
    assert session.length == len(text)
    present = story.value
    for name in ("epoch", "seq", "log_index"):
        assert at is not None or getattr(session, name) == getattr(present, name), name
    assert progress == (present.progress if at is None else None)


@pytest.mark.timeout(1800)
def test_stores_and_lists_know_the_same(request: pytest.FixtureRequest) -> None:
    max_examples = 1000 if request.config.getoption("--long") else 30
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(max_examples=max_examples, stateful_step_count=40, deadline=None),
    )
