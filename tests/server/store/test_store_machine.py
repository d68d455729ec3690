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

from server.engine.session import Record
from server.engine.types import Finished
from server.store.base import Fenced, Keyed, Store
from server.store.sqlite.database import Waiting
from server.store.sqlite.maintenance import problems
from server.store.sqlite.store import MemoryStore, SqliteStore, open_store
from server.store.table_store import StoreLimits
from tests.server.store.records import IDENTITY
from tests.server.store.stories import (
    Story,
    check_events,
    check_past,
    is_generating,
    is_idle,
    is_within_prompt,
    state_of,
)

MAX_SNAPSHOTS = 4
OWNERS = ("ann", "bob")
#: A tail of some hundred entries leaves the journal.
COUNTS = st.sampled_from([1, 2, 9, 270])
VERBS = ("token", "key", "end", "cancel")
ENDS = ("none", "close", "leave", "kill")


Wanted = Callable[[Story], bool]


class StoreMachine(RuleBasedStateMachine):
    """What an engine and its clients do; some records wait for later ones of their tick."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.names, self.now_s, self.num_lives = itertools.count(1), 0.0, 0
        self.memory = MemoryStore(limits=StoreLimits(max_snapshots=MAX_SNAPSHOTS), durable=True)
        self.disk = self.open_disk()
        self.left: list[SqliteStore] = []
        self.stories: dict[str, Story] = {}
        self.keys: dict[tuple[str, str], Keyed] = {}
        self.tick: list[Record] = []

    def open_disk(self) -> SqliteStore:
        limits, waiting = StoreLimits(max_snapshots=MAX_SNAPSHOTS), Waiting(lease_s=0.0)
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

    @initialize(owner=st.sampled_from(OWNERS), text=st.integers(1, 9))
    def begin(self, owner: str, text: int) -> None:
        story = self.new(owner)
        self.commit([story.opened(), *self.turn(story, text)], waits=False)

    @rule(owner=st.sampled_from(OWNERS), waits=st.booleans())
    def open(self, owner: str, waits: bool) -> None:
        self.commit([self.new(owner).opened()], waits)

    @precondition(lambda self: any(story.text for story in self.stories.values()))
    @rule(data=st.data(), num=st.integers(1, 3), waits=st.booleans())
    def fork(self, data: st.DataObject, num: int, waits: bool) -> None:
        """Copies that share a state."""
        old = self.one(data, lambda story: bool(story.text))
        text = tuple(old.text[: data.draw(st.integers(1, len(old.text)))])
        state = state_of(text)
        copies = [self.new(old.value.owner) for _ in range(num)]
        self.commit([copy.opened(state, text) for copy in copies], waits)

    @precondition(lambda self: self.stories)
    @rule(data=st.data(), verb=st.sampled_from(["save", "evict", "delete"]), waits=st.booleans())
    def put_away(self, data: st.DataObject, verb: str, waits: bool) -> None:
        story = self.one(data)
        if verb == "delete":
            del self.stories[story.id]
        records = [story.deleted() if verb == "delete" else story.saved(evicted=verb == "evict")]
        self.commit(records, waits)

    @precondition(lambda self: any(map(is_within_prompt, self.stories.values())))
    @rule(data=st.data(), waits=st.booleans())
    def save_within_prompt(self, data: st.DataObject, waits: bool) -> None:
        story = self.one(data, is_within_prompt)
        position = data.draw(st.integers(story.cut, len(story.text) - 1))
        self.commit([story.saved_within(position)], waits)

    @precondition(lambda self: any(map(is_idle, self.stories.values())))
    @rule(data=st.data(), count=COUNTS, waits=st.booleans())
    def rewind(self, data: st.DataObject, count: int, waits: bool) -> None:
        """Another text follows, or none."""
        story = self.one(data, is_idle)
        length = data.draw(st.integers(story.origin, len(story.text)))
        self.commit([story.rewound(length)], waits)
        if count > 1:
            self.commit(self.turn(story, count), waits)

    # Requests

    @precondition(lambda self: self.stories)
    @rule(data=st.data(), count=COUNTS, verb=st.sampled_from(VERBS), waits=st.booleans())
    def go_on(self, data: st.DataObject, count: int, verb: str, waits: bool) -> None:
        """What may come next: a session begins a request, has more tokens, or ends it."""
        story = self.one(data)
        if is_idle(story):
            records = [self.accepted(story, count, verb)]
        elif is_generating(story) and verb != "end":
            records = story.tokens(count)
        else:
            records = [self.finished(story, verb == "cancel")]
        self.commit(records, waits)

    @precondition(lambda self: any(map(is_generating, self.stories.values())))
    @rule(num_ticks=st.integers(1, 3), waits=st.booleans())
    def generate_all(self, num_ticks: int, waits: bool) -> None:
        """Ticks as they are under load: a token for everybody."""
        for _ in range(num_ticks):
            everybody = [story for story in self.stories.values() if is_generating(story)]
            self.commit([story.token() for story in everybody], waits)

    def turn(self, story: Story, count: int) -> list[Record]:
        begin = self.accepted(story, 2, "key")
        return [begin, *story.tokens(count), self.finished(story, is_cancelled=False)]

    def accepted(self, story: Story, length: int, verb: str) -> Record:
        name, has_key, feeds_only = f"r{next(self.names)}", verb != "token", verb == "end"
        owner, first_seq, start = story.value.owner, story.value.seq, len(story.text)
        if has_key:
            self.keys[owner, name] = Keyed(story.id, name, first_seq, start, None, feeds_only)
        tokens = tuple(range(length))
        key = name if has_key else None
        return story.accepted(tokens, request_id=name, key=key, feeds_only=feeds_only)

    def finished(self, story: Story, is_cancelled: bool) -> Record:
        assert story.value.progress is not None
        name = (story.value.owner, story.value.progress.request.key or "")
        record = story.cancelled() if is_cancelled else story.finished()
        if name in self.keys:
            assert isinstance(record[1], Finished)
            self.keys[name] = replace(self.keys[name], finished=record[1])
        return record

    # The life of a store

    @rule(seconds=st.sampled_from([0.0, 1.0, 100.0]), end=st.sampled_from(ENDS))
    def maintain(self, seconds: float, end: str) -> None:
        """About once a second; and at any moment it may be over, but for what is on the disk."""
        self.now_s += seconds
        for store in self.stores:
            store.maintain(self.now_s)
        if end != "none":
            getattr(self, end)()

    @rule(end=st.sampled_from(ENDS[1:]))
    def end(self, end: str) -> None:
        getattr(self, end)()

    def close(self) -> None:
        self.disk.close()
        self.disk = self.open_disk()

    def leave(self) -> None:
        """The owner hangs, and another one takes over."""
        old = self.disk
        self.disk = self.open_disk()
        with pytest.raises(Fenced):
            old.maintain(self.now_s)
        self.left.append(old)

    def kill(self) -> None:
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
                    for at in story.turns:
                        check_past(store, story, at)
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stores_and_lists_know_the_same(request: pytest.FixtureRequest) -> None:
    max_examples = 400 if request.config.getoption("--long") else 60
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(max_examples=max_examples, stateful_step_count=40, deadline=None),
    )
