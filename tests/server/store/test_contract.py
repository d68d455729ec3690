"""What every store promises of logs: the same tests for the one in memory and the ones on disk."""

from __future__ import annotations

from dataclasses import replace

import pytest

from server.engine.session import Rewound
from server.engine.types import Finished, TokenEvent
from server.errors import SessionNotFound
from server.store.base import HistoryGone, Store
from tests.server.store.records import Writer, block, in_ticks, text_after


class TestLoad:
    def test_entries_lead_to_the_present(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened()])
        in_ticks(store, writer.turn(3))
        loaded = store.load("s1", "ann")
        assert loaded.entries == writer.entries
        assert loaded.value.state is None

    def test_load_begins_at_the_newest_value(self, store: Store) -> None:
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

    def test_value_has_its_position_within_a_commit(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), writer.accepted(), writer.token(), writer.saved()])
        store.commit([writer.token(), writer.saved(), writer.token()])
        store.maintain(0.0)
        assert store.load("s1", "ann").entries == writer.entries[-1:]

    def test_load_returns_the_progress_of_a_request(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), writer.accepted(), *writer.tokens(2)])
        store.commit([writer.saved(evicted=True)])
        store.maintain(0.0)
        assert store.load("s1", "ann").value.progress == writer.value.progress

    @pytest.mark.parametrize("at", [0, 1, 7, 12, 13, 14, 29, 30])
    def test_load_at_begins_before_and_reaches_past_it(self, store: Store, at: int) -> None:
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

    def test_load_at_works_after_a_rewind(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(20)])
        store.commit([writer.rewound(10), *writer.turn(5)])
        loaded = store.load("s1", "ann", 9)
        assert text_after(loaded.value.length, loaded.entries)[:9] == writer.text[:9]
        loaded = store.load("s1", "ann", 15)
        reached = text_after(loaded.value.length, loaded.entries)
        assert len(reached) >= 15
        assert all(a in (None, b) for a, b in zip(reached, writer.text, strict=False))

    @pytest.mark.parametrize("is_maintained", [True, False])
    def test_save_within_a_prompt_leads_to_each_place_that_it_has_not_passed(
        self, store: Store, is_maintained: bool
    ) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(3), writer.accepted(tuple(range(100)))])
        for position in (0, 3, 30, 60):  # the first two have read less than the text before
            store.commit([writer.saved_within(position)])
            if is_maintained:
                store.maintain(float(position))
        store.commit([writer.finished(None)])
        for at, position in ((61, 60), (60, 30), (105, 60), (31, 30), (30, 3), (6, 3)):
            loaded = store.load("s1", "ann", at)
            if is_maintained or at > 60:
                assert loaded.value.position == position
                assert loaded.entries == (writer.entries[-1:] if at == 105 else [])
                assert loaded.value.state is not None
                assert loaded.value.state.data.tolist() == block(position).data.tolist()
            reached = text_after(loaded.value.length, loaded.entries)
            assert len(reached) >= at
        assert store.load("s1", "ann", 5).value.position == 0
        assert store.load("s1", "ann").value.position == 60

    def test_another_owner_finds_nothing(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(1)])
        for session, owner in (("s1", "bob"), ("s2", "ann")):
            with pytest.raises(SessionNotFound):
                store.load(session, owner)
            with pytest.raises(SessionNotFound):
                store.read(session, owner, 0, 10)
            with pytest.raises(SessionNotFound):
                store.entries(session, owner, 0, 10)
            with pytest.raises(SessionNotFound):
                store.log_end(session, owner)


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

    def test_value_within_a_prompt_stays_as_long_as_it_leads_to_the_text(
        self, store: Store
    ) -> None:
        writer = Writer()
        store.commit([writer.opened(), writer.accepted(tuple(range(100)))])
        for position in (30, 60):
            store.commit([writer.saved_within(position)])
            store.maintain(float(position))
        store.commit([writer.finished(None), writer.rewound(80)])
        store.maintain(100.0)
        found = [store.load("s1", "ann", at).value.position for at in (80, 79, 61, 60, 30)]
        assert found == [80, 60, 60, 30, 0]
        store.commit([writer.rewound(60)])
        assert store.load("s1", "ann", 59).value.position == 30
        assert store.load("s1", "ann").value.position == 60

    def test_rewind_is_an_entry_after_an_older_value(self, store: Store) -> None:
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
    def test_read_starts_after_any_event(self, store: Store, after_seq: int) -> None:
        writer = Writer()
        in_ticks(store, [writer.opened(), *writer.turn(6), *writer.turn(6)])
        events = store.read("s1", "ann", after_seq, 100)
        assert [event.seq for event in events] == list(range(after_seq + 1, 15))
        assert events == [
            e for e in writer.entries if isinstance(e, TokenEvent | Finished) and e.seq > after_seq
        ]

    def test_read_returns_at_most_the_limit(self, store: Store) -> None:
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

    def test_events_may_change_their_request_id(self, store: Store) -> None:
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


class TestEntries:
    def test_pages_lead_through_the_whole_log(self, store: Store) -> None:
        writer = Writer()
        in_ticks(store, [writer.opened(), *writer.turn(6)])
        store.commit([writer.accepted(feeds_only=True), writer.finished(None)])
        store.commit([writer.rewound(4), *writer.turn(3)])
        found, place = [], 0
        while page := store.entries("s1", "ann", place, 3):
            assert [number for number, _ in page] == [*range(place, place + len(page))]
            assert len(page) <= 3
            found += [entry for _, entry in page]
            place += len(page)
        assert place == store.log_end("s1", "ann")
        assert text_after(0, found) == text_after(0, writer.entries)
        assert [type(entry) for entry in found] == [type(entry) for entry in writer.entries]


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

    def test_fork_deleted_in_its_first_commit_is_not_listed(self, store: Store) -> None:
        copy = Writer()
        store.commit([copy.opened(block(3), (1, 2, 3)), copy.deleted()])
        assert store.list(None, None, 10) == []
