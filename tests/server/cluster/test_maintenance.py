"""What a replica does for the shared store without being asked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest

from server.store.postgres.store import SAVES_AT_ONCE, SWEEP_S, PostgresStore
from tests.server.cluster.stores import linked
from tests.server.store.places import Place
from tests.server.store.records import Writer, block


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
    query = "SELECT count(*) FROM snapshot GROUP BY session"
    assert set(Place(database_url).execute(query)) == {(2,)}


def num_snapshots(database_url: str) -> int:
    ((num,),) = Place(database_url).execute("SELECT count(*) FROM snapshot")
    return int(num)


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


def states(database_url: str) -> tuple[set[str], set[str]]:
    """Those in the table, and those that a row names."""
    execute = Place(database_url).execute
    objects = {str(name) for (name,) in execute("SELECT name FROM object")}
    found = execute("SELECT file FROM snapshot WHERE file IS NOT NULL")
    return objects, {str(file) for (file,) in found}


def test_superseded_states_are_deleted_soon(store: PostgresStore, database_url: str) -> None:
    writer = Writer()
    store.commit([writer.opened(), writer.accepted()])
    for number in range(40):
        store.commit([*writer.tokens(3), writer.saved()])
        store.maintain(float(number))
    before, _ = states(database_url)
    store.maintain(40.0 + SWEEP_S)
    objects, rows = states(database_url)
    assert objects == rows
    assert len(rows) < len(before) < 40


def test_state_that_was_deleted_is_written_again(
    store: PostgresStore, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row names a state that is gone, however late the row comes."""
    one, fork = Writer("one"), Writer("two")
    store.commit([one.opened(block(3), (1, 2, 3))])
    store.maintain(0.0)
    state = one.value.state
    assert state is not None and state.file is not None
    snapshots = linked(store).snapshots
    found = snapshots.file_of(state)
    for table, name in (("snapshot", "file"), ("object", "name")):  # another replica is quicker
        Place(database_url).execute(f"DELETE FROM {table} WHERE {name} = '{found}'")
    monkeypatch.setattr(snapshots, "file_of", lambda _: found)
    store.commit([fork.opened(state, (1, 2, 3))])
    store.maintain(1.0)
    objects, rows = states(database_url)
    assert objects == rows
    assert found not in rows
    assert store.load("two", "ann").value.state is not None


class TestRowAndSweepAtOnce:
    """Of a state that no row names: a replica makes a row for it while another one sweeps."""

    TAKE = "DELETE FROM garbage WHERE name IN (SELECT name FROM garbage FOR UPDATE SKIP LOCKED)"
    ADD = (
        "INSERT INTO snapshot (session, place, min_length, identity, value, file, bytes, sum) "
        "VALUES (1, 0, 0, 1, '', 'table-1', 0, 0)"
    )

    @pytest.fixture
    def two(
        self, store: PostgresStore, database_url: str, stack: ExitStack
    ) -> tuple[psycopg.Connection, psycopg.Connection]:
        options = "-c search_path=everstream_test -c lock_timeout=60000"
        one, other = (
            stack.enter_context(psycopg.connect(database_url, options=options)) for _ in range(2)
        )
        one.execute("INSERT INTO object VALUES ('table-1', '')")
        one.execute("INSERT INTO garbage VALUES ('table-1', 0)")
        one.commit()
        return one, other

    def test_row_is_refused_after_the_sweep(
        self, two: tuple[psycopg.Connection, psycopg.Connection]
    ) -> None:
        sweeper, replica = two
        assert sweeper.execute(self.TAKE).rowcount == 1
        sweeper.execute("DELETE FROM object WHERE name = 'table-1'")
        with ThreadPoolExecutor(1) as thread:
            added = thread.submit(replica.execute, self.ADD)
            sweeper.commit()
            with pytest.raises(psycopg.errors.SerializationFailure):
                added.result()

    def test_sweep_leaves_what_a_row_is_made_for(
        self, two: tuple[psycopg.Connection, psycopg.Connection]
    ) -> None:
        sweeper, replica = two
        replica.execute(self.ADD)
        assert sweeper.execute(self.TAKE).rowcount == 0
        sweeper.commit()
        replica.commit()
        due = "SELECT due_s > extract(epoch FROM now()) FROM garbage"
        assert sweeper.execute(due).fetchall() == [(True,)]
