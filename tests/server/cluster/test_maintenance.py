"""What a replica does for the shared store without being asked."""

from __future__ import annotations

import psycopg

from server.store.postgres.store import PostgresStore
from server.store.postgres.upkeep import SAVES_AT_ONCE
from tests.server.store.records import Writer


def test_every_state_is_written_eventually(store: PostgresStore, database_url: str) -> None:
    """Also where more states come than are written."""
    writers = [Writer(f"s{number}") for number in range(3 * SAVES_AT_ONCE)]
    for writer in writers:
        store.commit([writer.opened(), writer.accepted()])
    opened = num_snapshots(database_url)
    for now_s in range(1, 4):
        store.commit([record for writer in writers for record in (writer.token(), writer.saved())])
        store.maintain(float(now_s))
    assert num_snapshots(database_url) == opened + len(writers)
    with psycopg.connect(database_url) as connection:
        query = "SELECT count(*) FROM everstream_test.snapshot GROUP BY session"
        assert {num for (num,) in connection.execute(query)} == {2}


def num_snapshots(database_url: str) -> int:
    with psycopg.connect(database_url) as connection:
        (row,) = connection.execute("SELECT count(*) FROM everstream_test.snapshot").fetchall()
        return int(row[0])


def test_states_are_written_some_at_a_time_and_soon(
    store: PostgresStore, database_url: str
) -> None:
    num = 2 * SAVES_AT_ONCE + 1
    writers = [Writer(f"s{number}") for number in range(num)]
    for writer in writers:
        store.commit([writer.opened(), *writer.turn(3), writer.saved()])
    opened = num_snapshots(database_url)
    found = []
    for now_s in range(1, 5):
        has_more = store.maintain(float(now_s))
        found.append((has_more, num_snapshots(database_url) - opened))
    assert found == [(True, SAVES_AT_ONCE), (True, 2 * SAVES_AT_ONCE), (False, num), (False, num)]
