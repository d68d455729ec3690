"""What every store promises of keys, lists, ends and limits: see `test_contract`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from server.engine.session import Accepted
from server.errors import SessionNotFound
from server.store.base import HistoryGone, Store, StoreLost
from server.store.sqlite.store import MemoryStore
from tests.server.store.records import (
    IDENTITY,
    STATE_BYTES,
    Writer,
    file_digest,
    key_of,
    named_file,
    text_after,
)


class TestKeys:
    def test_a_key_names_its_request(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(2, request_id="r0")])
        store.commit([writer.accepted(key="k", request_id="r1"), writer.token()])
        keyed = key_of(store, "k")
        assert (keyed.session, keyed.request_id, keyed.first_seq) == ("s1", "r1", 3)
        assert (keyed.length, keyed.finished, keyed.is_append) == (4, None, False)
        store.commit([writer.finished()])
        keyed = key_of(store, "k")
        assert keyed.finished == writer.entries[-1]

    def test_keys_distinguish_append_from_generate(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), writer.accepted(key="k", feeds_only=True)])
        store.commit([writer.finished(None)])
        keyed = key_of(store, "k")
        assert keyed.is_append
        assert keyed.finished is not None

    def test_key_belongs_to_its_owner(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(1, key="k")])
        assert store.find_key("bob", "k") is None
        assert store.find_key("ann", "l") is None

    def test_key_outlives_its_session(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(1, key="k"), writer.deleted()])
        keyed = key_of(store, "k")
        assert keyed.finished == writer.entries[-1]

    def test_a_later_request_does_not_end_an_earlier_key(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(1, key="k", request_id="r1")])
        ended = writer.entries[-1]
        store.commit(writer.turn(1, request_id="r2"))
        keyed = key_of(store, "k")
        assert keyed.finished == ended


class TestList:
    def test_list_is_ordered_by_id_and_paged(self, store: Store) -> None:
        for name in ("c", "a", "d", "b"):
            store.commit([Writer(name).opened()])
        store.commit([Writer("bb", "bob").opened()])
        assert [each.id for each in store.list("ann", None, 3)] == ["a", "b", "c"]
        assert [each.id for each in store.list("ann", "c", 3)] == ["d"]
        assert [each.id for each in store.list(None, "b", 2)] == ["bb", "c"]

    def test_list_shows_position_and_unfinished(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), writer.accepted(), *writer.tokens(4)])
        (listed,) = store.list("ann", None, 10)
        assert (listed.id, listed.owner, listed.epoch) == ("s1", "ann", 0)
        assert (listed.length, listed.seq, listed.unfinished) == (6, 4, True)
        store.commit([writer.finished()])
        (listed,) = store.list("ann", None, 10)
        assert (listed.seq, listed.unfinished) == (5, False)

    def test_stored_bytes_are_counted_by_owner(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(5), writer.saved()])
        store.maintain(0.0)
        (listed,) = store.list("ann", None, 10)
        assert listed.stored_bytes == store.stored_bytes("ann") > 0
        assert store.stored_bytes("bob") == 0
        store.commit([writer.deleted()])
        assert store.stored_bytes("ann") == 0


class TestUnfinished:
    def test_unfinished_lists_requests_without_an_end(self, store: Store) -> None:
        running, ended, evicted = Writer("a"), Writer("b"), Writer("c", "bob")
        for writer in (running, ended, evicted):
            store.commit([writer.opened(), writer.accepted(), *writer.tokens(2)])
        store.commit([ended.finished(), evicted.saved(evicted=True)])
        store.maintain(0.0)
        assert sorted(store.unfinished()) == [("a", "ann"), ("c", "bob")]


class TestDelete:
    def test_deleted_session_leaves_nothing(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened(), *writer.turn(5), writer.saved()])
        store.commit([writer.deleted()])
        store.maintain(0.0)
        with pytest.raises(SessionNotFound):
            store.load("s1", "ann")
        assert store.list(None, None, 10) == []
        assert store.unfinished() == []

    def test_repeated_delete_is_accepted(self, store: Store) -> None:
        writer = Writer()
        store.commit([writer.opened()])
        store.commit([writer.deleted(), writer.deleted()])
        store.commit([writer.deleted()])
        with pytest.raises(SessionNotFound):
            store.load("s1", "ann")
        assert store.list(None, None, 10) == []

    def test_records_of_an_unknown_session_are_refused_whole(self, store: Store) -> None:
        known, unknown = Writer("a"), Writer("b")
        store.commit([known.opened(), known.accepted()])
        unknown.opened()
        with pytest.raises(StoreLost):
            store.commit([known.token(), unknown.accepted()])
        (listed,) = store.list(None, None, 10)
        assert (listed.id, listed.seq) == ("a", 0)


class TestLimits:
    def test_truncated_log_is_reported(self, small: Store) -> None:
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

    def test_unused_session_expires(self, small: Store) -> None:
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

    def test_loaded_or_unfinished_session_does_not_expire(self, small: Store) -> None:
        held, running = Writer("held"), Writer("running")
        small.maintain(0.0)
        small.commit([held.opened(), *held.turn(2)])
        small.commit([running.opened(), running.accepted(), running.saved(evicted=True)])
        small.maintain(10_000.0)
        small.maintain(20_000.0)
        assert [each.id for each in small.list(None, None, 10)] == ["held", "running"]
        assert isinstance(small.load("held", "ann").entries[0], Accepted)


def test_memory_drops_old_states_first() -> None:
    """Those of evicted sessions stay, as does what is needed to compute the others again."""
    store = MemoryStore(replace(IDENTITY, state_bytes=1 << 20), max_state_bytes=STATE_BYTES * 6)
    evicted, *live = (Writer(name) for name in ("evicted", "a", "b", "c", "d"))
    store.commit([evicted.opened(), *evicted.turn(2), evicted.saved(evicted=True)])
    store.commit([each.opened() for each in live])
    for tick in range(20):
        for each in live:
            store.commit([*each.turn(2), each.saved()])
        store.maintain(float(tick))
        assert store.stored_bytes("ann") >> 20 <= 6
    assert store.load("evicted", "ann").value.length == 4
    assert store.load("evicted", "ann").value.state is not None
    for each in live:
        loaded = store.load(each.id, "ann")
        assert len(text_after(loaded.value.length, loaded.entries)) == len(each.text)
    states = [store.load(each.id, "ann", at=40).value.state for each in live]
    assert states.count(None) == 4


def test_memory_has_the_keys_of_the_newest_sessions() -> None:
    store = MemoryStore(max_keys=2)
    for number in range(4):
        writer = Writer(f"s{number}")
        store.commit([writer.opened(), *writer.turn(1, key=f"k{number}"), writer.deleted()])
        store.commit([writer.opened(), writer.saved()])
    store.maintain(0.0)
    found = [store.find_key("ann", f"k{number}") for number in range(4)]
    assert [each is not None for each in found] == [False, False, True, True]


def test_memory_has_the_keys_that_were_used_last() -> None:
    store = MemoryStore(max_keys=2)
    old, new = Writer("old"), Writer("new")
    store.commit([old.opened(), *old.turn(1, key="first")])
    store.commit([new.opened(), *new.turn(1, key="a"), *new.turn(1, key="b")])
    store.commit(old.turn(1, key="second"))
    store.maintain(0.0)
    found = {key for key in ("first", "a", "b", "second") if store.find_key("ann", key)}
    assert found == {"b", "second"}
    store.commit(old.turn(1, key="b"))
    store.commit(new.turn(1, key="third"))
    store.maintain(1.0)
    assert store.find_key("ann", "second") is None
    assert store.find_key("ann", "b") is not None


class TestNamedStates:
    def test_named_states_are_kept_until_deleted(self, store: Store) -> None:
        assert store.named_states() == {}
        assert store.read_named("a") is None
        store.put_named("a", file_digest(1), named_file(1))
        store.put_named("b.x-1", file_digest(2), named_file(2))
        assert store.named_states() == {"a": file_digest(1), "b.x-1": file_digest(2)}
        assert store.read_named("a") == b"".join(named_file(1))
        assert store.drop_named("a")
        assert not store.drop_named("a")
        assert store.read_named("a") is None
        assert store.named_states() == {"b.x-1": file_digest(2)}

    def test_put_replaces_a_state_of_the_same_name(self, store: Store) -> None:
        for number in (1, 2):
            store.put_named("a", file_digest(number), named_file(number))
        assert store.named_states() == {"a": file_digest(2)}
        assert store.read_named("a") == b"".join(named_file(2))
