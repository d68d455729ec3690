"""What a replica knows after the database has crashed, and whatever was not synced is lost."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from server.store.base import HeldElsewhere
from server.store.postgres.store import PostgresStore
from tests.pgbouncer import PgBouncer, needs_pgbouncer
from tests.postgres import Postgres
from tests.server.cluster.stores import Join, check_whole, shared_place
from tests.server.store.records import Writer


def crash(postgres: Postgres) -> None:
    postgres.kill()
    postgres.start()


@needs_pgbouncer
def test_behind_a_pooler_nothing_is_lost(
    postgres: Postgres, database_url: str, stack: ExitStack
) -> None:
    """Its connection outlives the database, so that it is not told."""
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
    check_whole(store, writer)
    assert [event.seq for event in store.read("s1", "ann", 0, 100)] == [*range(1, 26)]


def test_session_that_was_taken_stays_taken(postgres: Postgres, join: Join) -> None:
    """The engine has it, and would continue with it."""
    one, other = join(), join()
    writer = Writer()
    one.commit([writer.opened(), *writer.turn(3)])
    one.release("s1")
    other.load("s1", "ann")
    crash(postgres)
    with pytest.raises(HeldElsewhere):
        one.load("s1", "ann")
    other.commit([*writer.turn(3)])
