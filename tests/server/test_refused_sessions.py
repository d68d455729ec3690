"""A store that refuses the records of one session: the others continue as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from server.engine.session import Opened, Record, SessionValue
from server.engine.types import TokenEvent
from server.errors import RequestError
from server.runtime.threads import commit_apart
from server.store.base import RecordRefused, StoreFailed, StoreLost
from server.store.sqlite.store import MemoryStore
from tests.server.failing_store import FailingStore
from tests.server.runtime.test_store_thread import Desk


class Choosy(FailingStore):
    """Refuses all that belongs to ``bad`` sessions, with the whole commit."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: dict[str, RequestError] = {}

    def commit(self, records: Sequence[Record]) -> None:
        for id, _ in records:
            if id in self.bad:
                raise self.bad[id]
        super().commit(records)


@pytest.fixture
def store() -> Choosy:
    return Choosy()


@pytest.fixture
def desk(store: Choosy) -> Iterator[Desk]:
    desk = Desk(store)
    desk.thread.start()
    yield desk
    store.unblock()
    assert desk.thread.close(60)


def opened(*ids: str) -> list[Record]:
    return [(id, Opened(SessionValue(id, "me"))) for id in ids]


def token(id: str, seq: int) -> Record:
    return id, TokenEvent(f"r-{id}", seq, seq, 65, "A")


def seqs(store: MemoryStore, id: str) -> list[int]:
    return [event.seq for event in store.read(id, "me", 0, 100)]


REFUSED = RecordRefused(ValueError("no such text"))


@pytest.mark.parametrize("error", [REFUSED, StoreLost("it is another replica's")])
@pytest.mark.parametrize("bad", [{"a"}, {"c"}, {"b", "d"}, set("abcde")])
def test_commit_apart_leaves_out_only_refused_sessions(
    store: Choosy, error: RequestError, bad: set[str]
) -> None:
    store.commit(opened(*"abcde"))
    store.bad = dict.fromkeys(bad, error)
    records = [token(id, seq) for seq in (1, 2) for id in "abcde"]
    assert commit_apart(store, records) == store.bad
    store.bad = {}
    assert {id: seqs(store, id) for id in "abcde"} == {
        id: [] if id in bad else [1, 2] for id in "abcde"
    }


def test_refused_session_alone_is_lost_and_forgotten(desk: Desk, store: Choosy) -> None:
    desk.add(*opened(*"abc"))
    desk.done()
    store.bad = {"b": REFUSED}
    step = desk.add(token("a", 1), token("b", 1), token("c", 1))
    desk.done()
    assert step.lost == {"b": REFUSED}
    assert desk.forgotten() == [(1, REFUSED, "b")]
    assert desk.thread.error is None
    assert desk.thread.generation == 0, "what is asked about other sessions is of use"
    assert (seqs(store, "a"), seqs(store, "c")) == ([1], [1])


def test_what_a_refused_session_did_before_it_was_forgotten_is_lost(
    desk: Desk, store: Choosy
) -> None:
    desk.add(*opened(*"ab"))
    desk.done()
    store.bad = {"b": REFUSED}
    desk.add(token("a", 1), token("b", 1))
    desk.done()
    store.bad = {}
    late = desk.add(token("a", 2), token("b", 2))
    desk.done()
    again = desk.add(token("a", 3), token("b", 1), generation=1)
    desk.done()
    assert (late.lost, again.lost) == ({"b": REFUSED}, {})
    assert (seqs(store, "a"), seqs(store, "b")) == ([1, 2, 3], [1])


def test_outage_while_sessions_are_retried_separately_affects_all(
    desk: Desk, store: Choosy
) -> None:
    desk.add(*opened(*"ab"))
    desk.done()
    outage = StoreFailed("it went away")
    store.bad = {"a": REFUSED, "b": outage}
    step = desk.add(token("a", 1), token("b", 1))
    desk.done()
    assert step.lost == {"a": outage, "b": outage}
    assert desk.forgotten() == [(1, outage, None)]
    assert desk.thread.error is outage
