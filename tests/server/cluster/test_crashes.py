"""What a replica knows after the database has crashed, and whatever was not synced is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from server.store.errors import Fenced, OwnedElsewhere
from server.store.postgres.store import PostgresStore
from tests.pgbouncer import PgBouncer
from tests.postgres import Postgres
from tests.server.cluster.stores import shared_place
from tests.server.store.records import Writer, text_after


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def crash(postgres: Postgres) -> None:
    postgres.kill()
    postgres.start()


def test_behind_a_pooler_nothing_is_lost(
    postgres: Postgres, database_url: str, stack: ExitStack
) -> None:
    """Its connection outlives the database, so that nobody is told."""
    pooler = stack.enter_context(closing(PgBouncer(postgres)))
    direct = shared_place(database_url)
    place = replace(direct, url=pooler.url(database_url), direct_url=database_url)
    store = stack.enter_context(closing(PostgresStore(place)))
    writer = Writer()
    store.commit([writer.opened()])
    store.commit([*writer.turn(20)])
    crash(postgres)
    store.maintain(1.0)
    store.commit([*writer.turn(3)])
    store.maintain(2.0)
    loaded = store.load("s1", "ann")
    length = loaded.value.length
    assert text_after(length, loaded.entries)[length:] == writer.text[length:]
    assert [event.seq for event in store.read("s1", "ann", 0, 100)] == [*range(1, 26)]


def test_session_that_was_taken_stays_taken(
    postgres: Postgres, database_url: str, stack: ExitStack
) -> None:
    """The engine has it, and would go on with it."""
    one, other = (
        stack.enter_context(closing(PostgresStore(shared_place(database_url)))) for _ in range(2)
    )
    writer = Writer()
    one.commit([writer.opened(), *writer.turn(3)])
    one.release("s1")
    other.load("s1", "ann")
    crash(postgres)
    with pytest.raises(OwnedElsewhere):
        one.load("s1", "ann")
    other.commit([*writer.turn(3)])


def test_database_that_has_lost_a_commit_is_not_written_to(
    database_url: str, stack: ExitStack
) -> None:
    """As after a failover to an older copy that nobody saw, behind a pooler."""
    store = stack.enter_context(closing(PostgresStore(shared_place(database_url))))
    writer = Writer()
    store.commit([writer.opened(), writer.accepted()])
    store.commit([writer.token()])
    connection = store._link.connection
    assert connection is not None
    query = "DELETE FROM journal WHERE id = (SELECT max(id) FROM journal)"
    connection.database.execute(query)
    with pytest.raises(Fenced, match="lost what this replica had committed"):
        store.commit([writer.token()])
