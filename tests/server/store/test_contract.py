"""What every store promises: the same tests for the one in memory and the one on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from server.engine.errors import SessionNotFound
from server.engine.types import Finished, TokenEvent
from server.engine.value import Accepted, Record, Rewound
from server.store.base import Store
from server.store.errors import HistoryGone, StoreLost
from server.store.memory_store import MemoryStore
from server.store.sqlite_store import open_store
from server.store.upkeep import Limits
from tests.server.store.records import IDENTITY, Writer, block, text_after

STORES = ("memory", "full", "relaxed")


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        made: Store = MemoryStore()
    else:
        made = open_store(tmp_path / "store", IDENTITY, request.param)
    yield made
    made.close()


@pytest.fixture(params=STORES)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store that keeps 1000 tokens of a log, and a session for an hour."""
    if request.param == "memory":
        made: Store = MemoryStore(max_log_tokens=1000, retention_s=3600)
    else:
        limits = Limits(max_log_tokens=1000, retention_s=3600)
        made = open_store(tmp_path / "store", IDENTITY, request.param, limits=limits)
    yield made
    made.close()


def in_ticks(store: Store, records: list[Record]) -> None:
    """Each record in a commit of its own."""
    for record in records:
        store.commit([record])


class TestLoad:
    def test_leads_to_the_present(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened()])
        in_ticks(store, writer.turn(3))
        loaded = store.load("s1", "ann")
        assert loaded.entries == writer.entries
        assert loaded.value.state is None

    def test_begins_at_the_newest_value(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(3), writer.saved()])
        value = writer.value
        store.commit([writer.accepted(), *writer.tokens(2)])
        store.maintain(0.0)
        loaded = store.load("s1", "ann")
        assert replace(loaded.value, state=None) == replace(value, state=None)
        assert loaded.value.state is not None
        assert loaded.value.state.data.tolist() == block(value.position).data.tolist()
        assert loaded.entries == writer.entries[-3:]

    def test_a_value_counts_where_it_stands_within_a_tick(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), writer.accepted(), writer.token(), writer.saved()])
        store.commit([writer.token(), writer.saved(), writer.token()])
        store.maintain(0.0)
        assert store.load("s1", "ann").entries == writer.entries[-1:]

    def test_keeps_the_progress_of_a_request(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), writer.accepted(), *writer.tokens(2)])
        store.commit([writer.saved(evicted=True)])
        store.maintain(0.0)
        assert store.load("s1", "ann").value.progress == writer.value.progress

    @pytest.mark.parametrize("at", [0, 1, 7, 12, 13, 14, 29, 30])
    def test_at_begins_before_and_leads_past(self, store: Store, at: int) -> None:
        writer = Writer()
        store.commit([writer.opened()])
        for _ in range(6):
            store.commit([*writer.turn(3), writer.saved()])
            store.maintain(0.0)
        loaded = store.load("s1", "ann", at)
        assert loaded.value.length <= at
        reached = text_after(loaded.value.length, loaded.entries)
        assert len(reached) >= min(at + 1, 30)
        assert all(a in (None, b) for a, b in zip(reached, writer.text, strict=False))

    def test_at_holds_where_the_text_was_cut_later(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(20)])
        store.commit([writer.rewound(10), *writer.turn(5)])
        loaded = store.load("s1", "ann", 9)
        assert text_after(loaded.value.length, loaded.entries)[:9] == writer.text[:9]
        loaded = store.load("s1", "ann", 15)
        reached = text_after(loaded.value.length, loaded.entries)
        assert len(reached) >= 15
        assert all(a in (None, b) for a, b in zip(reached, writer.text, strict=False))

    def test_another_owner_finds_nothing(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(1)])
        for session, owner in (("s1", "bob"), ("s2", "ann")):
            with pytest.raises(SessionNotFound):
                store.load(session, owner)
            with pytest.raises(SessionNotFound):
                store.read(session, owner, 0, 10)


class TestRewind:
    def test_values_beyond_the_cut_are_gone(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(8), writer.saved()])
        store.maintain(0.0)
        store.commit([*writer.turn(8), writer.saved()])
        store.maintain(1.0)
        store.commit([writer.rewound(15)])
        store.maintain(2.0)
        loaded = store.load("s1", "ann")
        assert (loaded.value.length, loaded.value.epoch, loaded.entries) == (15, 1, [])
        earlier = store.load("s1", "ann", 12)
        assert earlier.value.length == 10
        assert text_after(10, earlier.entries)[10:12] == writer.text[10:12]

    def test_is_among_the_entries_of_an_older_value(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(8)])
        store.commit([writer.rewound(4)])
        store.commit(writer.turn(2))
        loaded = store.load("s1", "ann", 3)
        rewinds = [entry for entry in loaded.entries if isinstance(entry, Rewound)]
        assert [entry.value.state for entry in rewinds] in ([None], [])
        assert text_after(loaded.value.length, loaded.entries)[:3] == writer.text[:3]

    def test_list_shows_the_new_epoch(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(8), writer.rewound(4)])
        (listed,) = store.list("ann", None, 10)
        assert (listed.epoch, listed.length, listed.seq) == (1, 4, 9)


class TestRead:
    @pytest.mark.parametrize("after_seq", [0, 1, 6, 7, 8, 12, 14])
    def test_goes_on_after_any_event(self, store: Store, after_seq: int) -> None:
        writer = Writer()
        in_ticks(store, [writer.opened(), *writer.turn(6), *writer.turn(6)])
        events = store.read("s1", "ann", after_seq, 100)
        assert [event.seq for event in events] == list(range(after_seq + 1, 15))
        assert events == [
            e for e in writer.entries if isinstance(e, TokenEvent | Finished) and e.seq > after_seq
        ]

    def test_gives_at_most_so_many(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(6)])
        assert [event.seq for event in store.read("s1", "ann", 2, 3)] == [3, 4, 5]
        assert store.read("s1", "ann", 2, 0) == []

    def test_a_request_that_only_feeds_has_no_event(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(2)])
        store.commit([writer.accepted(feeds_only=True), writer.finished(None)])
        store.commit([writer.accepted(feeds_only=True), writer.finished("cancelled")])
        store.commit(writer.turn(1))
        assert [event.seq for event in store.read("s1", "ann", 0, 100)] == [1, 2, 3, 4, 5]

    def test_goes_on_under_another_request_id(self, store: Store) -> None:
        """A resumed request has the name that its new reader gave it."""
        writer = Writer()
        store.commit([writer.opened(), writer.accepted(), writer.token()])
        _, later = writer.token()
        assert isinstance(later, TokenEvent)
        store.commit([("s1", later._replace(request_id="r1-again"))])
        ids = [event.request_id for event in store.read("s1", "ann", 0, 9)]
        assert ids == ["r1", "r1-again"]

    def test_what_a_fork_inherits_is_not_in_its_log(self, store: Store) -> None:
        writer = Writer()
        writer.value = replace(writer.value, seq=5)
        store.commit([writer.opened(block(3), (1, 2, 3)), *writer.turn(2)])
        assert [event.seq for event in store.read("s1", "ann", 5, 9)] == [6, 7, 8]
        with pytest.raises(HistoryGone):
            store.read("s1", "ann", 4, 9)


class TestFork:
    def test_copies_share_a_state(self, store: Store) -> None:
        state = block(3)
        copies = [Writer(f"s{i}") for i in range(3)]
        store.commit([copy.opened(state, (1, 2, 3)) for copy in copies])
        store.commit(copies[0].turn(2))
        for copy in copies:
            loaded = store.load(copy.id, "ann")
            assert loaded.value.state is not None
            assert loaded.value.state.data.tolist() == state.data.tolist()
            assert loaded.entries == copy.entries

    def test_one_that_was_given_up_at_once_is_not_there(self, store: Store) -> None:
        copy = Writer()
        store.commit([copy.opened(block(3), (1, 2, 3)), copy.deleted()])
        assert store.list(None, None, 10) == []


class TestKeys:
    def test_a_key_names_its_request(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(2, request_id="r0")])
        store.commit([writer.accepted(key="k", request_id="r1"), writer.token()])
        keyed = store.find_key("ann", "k")
        assert keyed is not None
        assert (keyed.session, keyed.request_id, keyed.first_seq) == ("s1", "r1", 3)
        assert (keyed.length, keyed.finished, keyed.is_append) == (4, None, False)
        store.commit([writer.finished()])
        keyed = store.find_key("ann", "k")
        assert keyed is not None
        assert keyed.finished == writer.entries[-1]

    def test_appending_is_told_from_generating(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), writer.accepted(key="k", feeds_only=True)])
        store.commit([writer.finished(None)])
        keyed = store.find_key("ann", "k")
        assert keyed is not None
        assert keyed.is_append
        assert keyed.finished is not None

    def test_is_its_owners_alone(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(1, key="k")])
        assert store.find_key("bob", "k") is None
        assert store.find_key("ann", "l") is None

    def test_outlives_its_session(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(1, key="k"), writer.deleted()])
        keyed = store.find_key("ann", "k")
        assert keyed is not None
        assert keyed.finished == writer.entries[-1]

    def test_a_later_request_does_not_end_an_earlier_key(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(1, key="k", request_id="r1")])
        ended = writer.entries[-1]
        store.commit(writer.turn(1, request_id="r2"))
        keyed = store.find_key("ann", "k")
        assert keyed is not None
        assert keyed.finished == ended


class TestList:
    def test_is_ordered_by_id_and_goes_on(self, store: Store) -> None:
        for name in ("c", "a", "d", "b"):
            store.commit([Writer(name).opened()])
        store.commit([Writer("bb", "bob").opened()])
        assert [each.id for each in store.list("ann", None, 3)] == ["a", "b", "c"]
        assert [each.id for each in store.list("ann", "c", 3)] == ["d"]
        assert [each.id for each in store.list(None, "b", 2)] == ["bb", "c"]

    def test_shows_where_a_session_is(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), writer.accepted(), *writer.tokens(4)])
        (listed,) = store.list("ann", None, 10)
        assert (listed.id, listed.owner, listed.epoch) == ("s1", "ann", 0)
        assert (listed.length, listed.seq, listed.unfinished) == (6, 4, True)
        store.commit([writer.finished()])
        (listed,) = store.list("ann", None, 10)
        assert (listed.seq, listed.unfinished) == (5, False)

    def test_counts_bytes_of_each_owner(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(5), writer.saved()])
        store.maintain(0.0)
        (listed,) = store.list("ann", None, 10)
        assert listed.stored_bytes == store.stored_bytes("ann") > 0
        assert store.stored_bytes("bob") == 0
        store.commit([writer.deleted()])
        assert store.stored_bytes("ann") == 0


class TestUnfinished:
    def test_is_what_has_no_end(self, store: Store) -> None:
        running, ended, evicted = Writer("a"), Writer("b"), Writer("c", "bob")
        for writer in (running, ended, evicted):
            store.commit([writer.opened(), writer.accepted(), *writer.tokens(2)])
        store.commit([ended.finished(), evicted.saved(evicted=True)])
        store.maintain(0.0)
        assert sorted(store.unfinished()) == [("a", "ann"), ("c", "bob")]


class TestDelete:
    def test_leaves_nothing(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(5), writer.saved()])
        store.commit([writer.deleted()])
        store.maintain(0.0)
        with pytest.raises(SessionNotFound):
            store.load("s1", "ann")
        assert store.list(None, None, 10) == []
        assert store.unfinished() == []

    def test_twice_is_as_once(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened()])
        store.commit([writer.deleted(), writer.deleted()])
        store.commit([writer.deleted()])

    def test_records_of_an_unknown_session_are_refused_whole(self, store: Store) -> None:
        known, unknown = Writer("a"), Writer("b")
        store.commit([known.opened(), known.accepted()])
        unknown.opened()
        with pytest.raises(StoreLost):
            store.commit([known.token(), unknown.accepted()])
        (listed,) = store.list(None, None, 10)
        assert (listed.id, listed.seq) == ("a", 0)


class TestLimits:
    def test_an_old_log_is_cut_and_says_so(self, small: Store) -> None:
        writer = Writer()
        small.commit([writer.opened()])
        for tick in range(20):
            small.commit([*writer.turn(300), writer.saved()])
            small.maintain(float(tick))
        with pytest.raises(HistoryGone):
            small.read("s1", "ann", 0, 10)
        with pytest.raises(HistoryGone):
            small.load("s1", "ann", 5)
        loaded = small.load("s1", "ann")
        assert (loaded.value.length, loaded.entries) == (len(writer.text), [])
        last = writer.value.seq
        assert [e.seq for e in small.read("s1", "ann", last - 5, 10)] == [
            *range(last - 4, last + 1)
        ]

    def test_the_newest_values_lead_on_after_a_cut(self, small: Store) -> None:
        writer = Writer()
        small.commit([writer.opened()])
        for tick in range(20):
            small.commit([*writer.turn(100), writer.saved()])
            small.maintain(float(tick))
        at = len(writer.text) - 150
        loaded = small.load("s1", "ann", at)
        assert text_after(loaded.value.length, loaded.entries)[at - 1] == writer.text[at - 1]

    def test_what_nobody_uses_expires(self, small: Store) -> None:
        used, unused = Writer("used"), Writer("unused")
        small.maintain(0.0)
        for writer in (used, unused):
            small.commit([writer.opened(), *writer.turn(2), writer.saved(evicted=True)])
        small.maintain(3000.0)
        small.load("used", "ann")
        small.maintain(3500.0)
        assert len(small.list(None, None, 10)) == 2
        small.maintain(3700.0)
        small.maintain(3701.0)
        assert [each.id for each in small.list(None, None, 10)] == ["used"]

    def test_what_the_engine_holds_or_has_not_ended_does_not_expire(self, small: Store) -> None:
        held, running = Writer("held"), Writer("running")
        small.maintain(0.0)
        small.commit([held.opened(), *held.turn(2)])
        small.commit([running.opened(), running.accepted(), running.saved(evicted=True)])
        small.maintain(10_000.0)
        small.maintain(20_000.0)
        assert [each.id for each in small.list(None, None, 10)] == ["held", "running"]
        assert isinstance(small.load("held", "ann").entries[0], Accepted)


def test_old_states_of_memory_go_first() -> None:
    store = MemoryStore(max_state_bytes=24 * 6)
    evicted, live = Writer("evicted"), Writer("live")
    store.commit([evicted.opened(), *evicted.turn(2), evicted.saved(evicted=True), live.opened()])
    for _ in range(20):
        store.commit([*live.turn(2), live.saved()])
    assert store.load("evicted", "ann").value.length == 4
    assert store.load("live", "ann").value.length == len(live.text)
    assert store.stored_bytes("ann") < 24 * 9 + 100 * 200
