"""Rows of a shared store that were altered: they cost their session, and no replica."""

from __future__ import annotations

import pytest

from server.errors import RequestError
from server.store.base import SessionBroken
from server.store.postgres.store import PostgresStore
from tests.server.cluster.stores import Join
from tests.server.store.places import Place
from tests.server.store.records import Writer, block, text_after

#: What is altered, and the session that it costs; None: it costs none.
ALTERED = {
    "a token in the journal": (
        """UPDATE journal SET data = decode(replace(encode(data, 'hex'),
        encode(',107,', 'hex'), encode(',207,', 'hex')), 'hex')""",
        "one",
    ),
    "a line without its end": (
        """UPDATE journal SET data = substr(data, 1, length(data) - 9)
        WHERE id = (SELECT max(id) FROM journal)""",
        "two",
    ),
    "the keys of the lines": ("UPDATE journal SET keys = overlay(keys placing 'x' from 3)", None),
    "a row of the journal": (
        "DELETE FROM journal WHERE id = (SELECT max(id) - 1 FROM journal)",
        "one",
    ),
    "a segment": ("UPDATE segment SET data = overlay(data placing '\\x37'::bytea from 14)", "idle"),
    "a session": ("UPDATE session SET length = length + 1 WHERE id = 'idle'", "idle"),
    "a snapshot": ("UPDATE snapshot SET place = 1 WHERE value LIKE '%two%'", "two"),
    "an identity": ("UPDATE identity SET fields = replace(fields, 'model-1', 'model-2')", None),
}


def filled(store: PostgresStore) -> dict[str, Writer]:
    """Two sessions that run, with the ends of their logs in the journal, and one that does not."""
    one, two, idle = (Writer(id) for id in ("one", "two", "idle"))
    store.commit([one.opened(), two.opened(block(3), (1, 2, 3)), idle.opened()])
    store.commit([*idle.turn(9)])
    store.commit([one.accepted(tokens=tuple(range(1, 8))), two.accepted()])
    store.commit([one.token(), one.token()])
    store.commit([one.token(), two.token()])
    return {writer.id: writer for writer in (one, two, idle)}


def refused(store: PostgresStore, writers: dict[str, Writer]) -> set[str]:
    """The sessions that are refused; the others are as they were written."""
    found: set[str] = set()
    for id, writer in writers.items():
        try:
            loaded = store.load(id, "ann")
        except RequestError as error:
            found.add(f"{id} {error.code}")
            continue
        length = loaded.value.length
        assert text_after(length, loaded.entries)[length:] == writer.text[length:]
        events = store.read(id, "ann", writer.value.seq - 1, 10)
        assert [event.seq for event in events] == [writer.value.seq]
    return found


@pytest.mark.parametrize("what", ALTERED)
def test_an_altered_row_costs_its_session_at_most(join: Join, database_url: str, what: str) -> None:
    one, other = join(), join()
    writers = filled(one)
    Place(database_url).execute(ALTERED[what][0])
    one._link.abandon()
    assert other.reclaim(one.key)
    cost = ALTERED[what][1]
    assert {each.partition(" ")[0] for each in refused(other, writers)} == ({cost} - {None})
    writer = Writer("new")
    other.commit([writer.opened(), *writer.turn(2)])
    assert refused(other, {"new": writer}) == set()


def test_altered_events_are_not_sent_by_another_replica(join: Join, database_url: str) -> None:
    one, other = join(), join()
    writers = filled(one)
    Place(database_url).execute(ALTERED["a token in the journal"][0])
    with pytest.raises(SessionBroken):
        other.read("one", "ann", 0, 10)
    assert [event.seq for event in other.read("two", "ann", 0, 10)] == [1]
    assert writers["two"].value.seq == 1
