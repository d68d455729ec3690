"""Rows that the database refuses, for reasons that lie in the data of one session.

Such rows come in below all checks of what clients send. The databases are real; some of the
refusals are constraints that a test adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

import pytest

from server.engine.session import Record, Saved
from server.errors import SessionNotFound
from server.runtime.threads import commit_apart
from server.store.base import RecordRefused, SessionBroken, Store, StoreError, StoreLost
from tests.server.store.places import Place
from tests.server.store.records import Writer, text_after

BEYOND = 1 << 63


@dataclass(frozen=True)
class Poison:
    """Makes a turn of a session that the database does not take."""

    make: Callable[[Place, Writer], list[Record]]
    is_shared_only: bool = False


def _nul(place: Place, writer: Writer) -> list[Record]:
    return writer.turn(3, request_id="a\0b", key="k")


def _long_key(place: Place, writer: Writer) -> list[Record]:
    return writer.turn(3, key=token_hex(10_000))


def _refused_key(place: Place, writer: Writer) -> list[Record]:
    refuse(place, "request_key", "key", "'poison'")
    return writer.turn(3, key="poison")


def _refused_segment(place: Place, writer: Writer) -> list[Record]:
    refuse(place, "segment", "num_tokens", "16")
    return writer.turn(13)


def _large_number(place: Place, writer: Writer) -> list[Record]:
    writer.value = replace(writer.value, seq=BEYOND)
    return [writer.accepted(key="k")]


def refuse(place: Place, table: str, column: str, value: str) -> None:
    """Rows of ``table`` with this are refused from now on."""
    if place.is_shared:
        check = f"ADD CONSTRAINT refused CHECK ({column} <> {value}) NOT VALID"
        place.execute(f"ALTER TABLE {table} {check}")
    else:
        place.execute(
            f"CREATE TRIGGER refused BEFORE INSERT ON {table} WHEN NEW.{column} = {value} "
            "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )


POISONS = {
    "nul": Poison(_nul, is_shared_only=True),
    "long_key": Poison(_long_key, is_shared_only=True),
    "refused_key": Poison(_refused_key),
    "refused_segment": Poison(_refused_segment),
    "large_number": Poison(_large_number),
}


@pytest.fixture(params=POISONS)
def poison(request: pytest.FixtureRequest, place: Place) -> Poison:
    poison = POISONS[request.param]
    if poison.is_shared_only and not place.is_shared:
        return POISONS["refused_key"]  # SQLite takes those
    return poison


@pytest.fixture
def writers() -> list[Writer]:
    return [Writer(id, owner) for id, owner in (("bad", "eve"), ("s1", "ann"), ("s2", "bob"))]


def begun(place: Place, writers: list[Writer]) -> Any:
    """A store in which each session has had a turn."""
    store = place.open()
    store.commit([writer.opened() for writer in writers])
    store.commit([record for writer in writers for record in writer.turn(2)])
    return store


def mixed(place: Place, poison: Poison, writers: list[Writer]) -> list[Record]:
    """The poisoned turn of the first session, among turns of the others."""
    bad, *others = writers
    before = [record for writer in others for record in [writer.accepted(), writer.token()]]
    after = [record for writer in others for record in [*writer.tokens(2), writer.finished()]]
    return [*before, *poison.make(place, bad), *after]


def check_others(store: Store, writers: list[Writer]) -> None:
    """All that they have done is there, and they continue."""
    for writer in writers[1:]:
        store.load(writer.id, writer.value.owner)
        assert commit_apart(store, writer.turn(2)) == {}
        loaded = store.load(writer.id, writer.value.owner)
        length = loaded.value.length
        assert text_after(length, loaded.entries)[length:] == writer.text[length:]


def check_quarantine(store: Store) -> None:
    for ask in (store.load, lambda id, owner: store.read(id, owner, 0, 10)):
        with pytest.raises(SessionBroken):
            ask("bad", "eve")
    assert "bad" not in dict(store.unfinished())


def num_logged(caplog: pytest.LogCaptureFixture) -> int:
    """How often it was said that the session is in quarantine."""
    found = [record.getMessage() for record in caplog.records]
    return sum(line.startswith("session bad is in quarantine") for line in found)


def test_row_that_is_refused_costs_its_session_alone(
    place: Place, poison: Poison, writers: list[Writer], caplog: pytest.LogCaptureFixture
) -> None:
    with closing(begun(place, writers)) as store:
        assert commit_apart(store, mixed(place, poison, writers)) == {}
        check_others(store, writers)
        lost = commit_apart(store, [("bad", Saved(writers[0].value)), writers[1].accepted()])
        assert [type(error) for error in lost.values()] == [StoreLost]
        store.maintain(1.0)
        check_quarantine(store)
    with closing(place.open()) as store:
        store.maintain(2.0)
        check_quarantine(store)
        assert store.read("s1", "ann", 0, 100)
    assert num_logged(caplog) == 1


def test_journal_that_has_such_a_row_is_recovered(
    place: Place, poison: Poison, writers: list[Writer], caplog: pytest.LogCaptureFixture
) -> None:
    """As an earlier version leaves one behind, whose process is gone."""
    with begin_and_die(place, poison, writers):
        with closing(place.open()) as store:
            store.maintain(1.0)
            check_quarantine(store)
            check_others(store, writers)
        with closing(place.open()) as store:
            check_quarantine(store)
            check_others(store, writers)
            with pytest.raises(SessionNotFound):
                store.discard("bad", "ann")
            store.discard("bad", "eve")
            with pytest.raises(SessionNotFound):
                store.load("bad", "eve")
    assert num_logged(caplog) == 1


@contextmanager
def begin_and_die(place: Place, poison: Poison, writers: list[Writer]) -> Iterator[None]:
    """What is committed does not reach the tables; then other replicas take over."""
    store = begun(place, writers)
    records = mixed(place, poison, writers)
    if not place.is_shared:
        store._connection.log.append(records)
        store._abandon()
        store.close()
        yield
        return
    store._link.connection.log.append(records)
    store.presence.close()
    with closing(place.open()) as other:
        assert other.reclaim(store.key)
        yield
    with suppress(StoreError):
        store._link.close()


def test_value_that_cannot_be_written_is_refused_before_it_counts(
    place: Place, writers: list[Writer]
) -> None:
    with closing(begun(place, writers)) as store:
        bad, good, _ = writers
        known = list(bad.text)
        records = [bad.accepted(), bad.token("a\ud800b"), *good.turn(2)]
        (error,) = commit_apart(store, records).values()
        assert isinstance(error, RecordRefused)
        assert error.message.isascii()
        loaded = store.load("bad", "eve")
        assert text_after(loaded.value.length, loaded.entries) == known
        check_others(store, writers)


def test_new_session_that_is_refused_leaves_nothing(place: Place, writers: list[Writer]) -> None:
    with closing(begun(place, writers)) as store:
        refuse(place, "session", "owner", "'eve'")
        new = Writer("new", "eve")
        commit_apart(store, [new.opened(), *writers[1].turn(2)])
        with pytest.raises(SessionNotFound):
            store.load("new", "eve")
        check_others(store, writers)
        store.maintain(1.0)
