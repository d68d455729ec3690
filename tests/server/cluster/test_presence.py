"""Which replicas are dead, as the others see it: by a free lock, or by a beat that stands still."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import psycopg
import pytest

from server.store.postgres.link import Presence
from server.store.postgres.store import PostgresStore
from tests.postgres import Postgres
from tests.server.cluster.stores import shared_place

SCHEMA = "everstream_test"
TIMEOUT_S = 120.0


class Watcher:
    """A replica that notes which it would reclaim, and what it hears."""

    def __init__(self, url: str, store_id: str, lease_s: float) -> None:
        self.dead: queue.Queue[int] = queue.Queue()
        self.gone: queue.Queue[int] = queue.Queue()
        self.heard: queue.Queue[str] = queue.Queue()
        self.presence = Presence(url, SCHEMA, store_id, "here", lease_s)
        self.presence.reclaim = self.dead.put
        self.presence.left = self.gone.put
        self.presence.hear = self.heard.put
        self.key = self.presence.key

    def start(self) -> Watcher:
        self.presence.start()
        return self


Join = Callable[..., Watcher]


@pytest.fixture
def join(database_url: str) -> Iterator[Join]:
    """Another watcher, which does nothing before its `Watcher.start`."""
    store_id = made_store(database_url)
    joined: list[Watcher] = []

    def join(lease_s: float = 30.0) -> Watcher:
        joined.append(Watcher(database_url, store_id, lease_s))
        return joined[-1]

    yield join
    for each in joined:
        each.presence.close()


def made_store(url: str) -> str:
    """The name of a store that the database gets, with its tables."""
    store = PostgresStore(shared_place(url))
    store.close()
    return store.store_id


def beat_of(postgres: Postgres, url: str, key: int) -> int:
    query = f"SELECT beat FROM everstream_test.replica WHERE key = {key}"
    return int(postgres.psql(query, url.rpartition("/")[2]))


def test_replica_without_its_lock_is_dead_before_its_lease_ends(join: Join) -> None:
    one, other = join().start(), join().start()
    one.presence.close()
    assert other.dead.get(timeout=TIMEOUT_S) == one.key


def test_replica_without_heartbeat_is_dead_after_a_lease(join: Join) -> None:
    """It holds its lock, and its thread does not run."""
    one, other = join(0.5), join(0.5).start()
    assert other.dead.get(timeout=TIMEOUT_S) == one.key


def test_live_replica_is_not_reported_dead(
    join: Join, postgres: Postgres, database_url: str
) -> None:
    one, other = join(5.0).start(), join(5.0).start()
    while min(beat_of(postgres, database_url, each.key) for each in (one, other)) < 7:
        pass
    assert one.dead.empty()
    assert other.dead.empty()


def test_departed_replica_is_reported(join: Join, postgres: Postgres, database_url: str) -> None:
    one, other = join(5.0).start(), join(5.0).start()
    while beat_of(postgres, database_url, other.key) < 2:  # it has looked around by then
        pass
    postgres.psql(
        f"DELETE FROM everstream_test.replica WHERE key = {one.key}",
        database_url.rpartition("/")[2],
    )
    assert other.gone.get(timeout=TIMEOUT_S) == one.key


def test_lost_connection_does_not_report_a_replica_dead(
    join: Join, postgres: Postgres, database_url: str
) -> None:
    one, other = join(3.0).start(), join(3.0).start()
    before = [beat_of(postgres, database_url, each.key) for each in (one, other)]
    postgres.psql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND datname = current_database()",
        database_url.rpartition("/")[2],
    )
    for each, beat in zip((one, other), before, strict=True):
        while beat_of(postgres, database_url, each.key) < beat + 4:
            pass
    assert one.dead.empty()
    assert other.dead.empty()


def test_notification_reaches_only_its_replica(
    join: Join, postgres: Postgres, database_url: str
) -> None:
    one, other = join().start(), join().start()
    postgres.psql(f"NOTIFY \"everstream_test {one.key}\", 'hello'", database_url.rpartition("/")[2])
    assert one.heard.get(timeout=TIMEOUT_S) == "hello"
    assert other.heard.empty()


def test_each_replica_watches_only_its_two_neighbours(join: Join) -> None:
    """The work of each is the same, however many there are; the ring is closed."""
    first, second, third, *_, last = (join(0.5) for _ in range(6))
    first.start()
    last.start()
    assert {first.dead.get(timeout=TIMEOUT_S) for _ in range(20)} == {second.key, third.key}
    assert {last.dead.get(timeout=TIMEOUT_S) for _ in range(5)} <= {first.key, second.key}


def test_stale_connection_is_terminated(join: Join) -> None:
    one = join()
    again = one.presence._connect()
    one.presence._enter(again)  # would wait endlessly for the lock of the first
    with pytest.raises(psycopg.OperationalError):
        one.presence._first.execute("SELECT 1")
    again.close()


def test_key_is_not_claimed_in_a_store_that_took_the_place_of_its_own(
    join: Join, postgres: Postgres, database_url: str
) -> None:
    """Keys begin again there, so that the same one is another replica's."""
    one, name = join(), database_url.rpartition("/")[2]
    one.presence._first.close()
    postgres.psql(f"ALTER DATABASE {name} RENAME TO {name}_lost")
    postgres.psql(f"CREATE DATABASE {name}")
    again = one.presence._connect()
    with pytest.raises(psycopg.Error):  # before it has tables
        one.presence._enter(again)
    other = Watcher(database_url, made_store(database_url), 30.0)
    while other.key < one.key:
        other.presence.close()
        other = Watcher(database_url, other.presence.store_id, 30.0)
    assert other.key == one.key
    with pytest.raises(psycopg.Error, match="another store"):
        one.presence._enter(again)
    other.presence._first.execute("SELECT 1")  # was not terminated
    other.presence.close()
    again.close()


def test_hanging_database_reports_no_replica_dead(
    join: Join, postgres: Postgres, database_url: str
) -> None:
    one, other = join(1.0).start(), join(1.0).start()
    before = [beat_of(postgres, database_url, each.key) for each in (one, other)]
    postgres.pause()
    try:
        with pytest.raises(queue.Empty):
            one.dead.get(timeout=2.5)  # longer than a lease
    finally:
        postgres.go_on()
    for each, beat in zip((one, other), before, strict=True):
        while beat_of(postgres, database_url, each.key) < beat + 5:
            pass
    assert one.dead.empty()
    assert other.dead.empty()
