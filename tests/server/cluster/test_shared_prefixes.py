"""The prefix cache that replicas share, over a real PostgreSQL and a real S3 server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import psycopg
import pytest

from server.store.base import Chunk, Identity
from server.store.postgres.database import PostgresDatabase, connect, migrate
from server.store.postgres.objects import (
    Connection,
    Objects,
    SharedLimits,
    SharedPrefixes,
    TableObjects,
)
from server.store.postgres.s3 import S3Objects
from server.store.states import encode_prefix
from tests.postgres import Postgres
from tests.s3_server import S3Server
from tests.server.store.prefixes import IDENTITY, TEXT, found, named, new

SCHEMA = "everstream_test"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Wrapped:
    """Calls ``after_put`` and ``after_delete`` when ``objects`` has done these."""

    def __init__(
        self,
        objects: Objects,
        after_put: Callable[[], object],
        after_delete: Callable[[], object],
    ) -> None:
        self._objects, self._after_put, self._after_delete = objects, after_put, after_delete

    def put(self, name: str, parts: Sequence[Chunk]) -> None:
        self._objects.put(name, parts)
        self._after_put()

    def get(self, name: str) -> bytes:
        return self._objects.get(name)

    def delete(self, names: Sequence[str]) -> None:
        self._objects.delete(names)
        self._after_delete()

    def close(self) -> None:
        self._objects.close()


class Crash(BaseException):
    """The process ends here."""


def crash() -> None:
    raise Crash


class Replicas:
    """Any number of replicas, and what they have in common."""

    def __init__(self, url: str, s3: S3Server | None) -> None:
        self._url, self._s3 = url, s3
        self._bucket = s3.new_bucket() if s3 else ""
        self._open = ExitStack()
        self.clock = Clock()
        database = PostgresDatabase(url, SCHEMA, is_full=False)
        migrate(database)
        database.close()
        self._connection = self._open.enter_context(
            psycopg.connect(url, autocommit=True, options=f"-csearch_path={SCHEMA}")
        )

    def new(
        self,
        identity: Identity = IDENTITY,
        after_put: Callable[[], object] = lambda: None,
        after_delete: Callable[[], object] = lambda: None,
        **limits: float,
    ) -> SharedPrefixes:
        usual = {"max_bytes": 10**9, "min_tokens": 32, "rarely_s": 0.0, "grace_s": 0.0}
        made = SharedPrefixes(
            lambda: connect(self._url),
            SCHEMA,
            lambda connection: Wrapped(self._place(connection), after_put, after_delete),
            identity,
            SharedLimits(**{**usual, **limits}),  # type: ignore[arg-type]
            self.clock,
        )
        self._open.callback(made.close)
        return made

    def _place(self, connection: Connection) -> Objects:
        if self._s3 is None:
            return TableObjects(connection)
        return S3Objects(self._s3.url(self._bucket), {})

    def ask(self, query: str) -> list[tuple[object, ...]]:
        return self._connection.execute(query.encode()).fetchall()

    def run(self, query: str) -> None:
        self._connection.execute(query.encode())

    def objects(self) -> set[str]:
        """The names of all states that are somewhere."""
        if self._s3 is None:
            return {str(name) for (name,) in self.ask("SELECT name FROM object")}
        return {name.removeprefix("states/") for name in self._s3.objects(self._bucket)}

    def rows(self) -> set[str]:
        return {str(name) for (name,) in self.ask("SELECT name FROM prefix")}

    def garbage(self) -> set[str]:
        return {str(name) for (name,) in self.ask("SELECT name FROM garbage")}

    def spoil(self, num_tokens: int) -> None:
        """Alters a byte of the states after so many tokens."""
        for (name,) in self.ask(f"SELECT name FROM prefix WHERE num_tokens = {num_tokens}"):
            if self._s3 is None:
                self.run(f"UPDATE object SET data = set_byte(data, 9, 1) WHERE name = '{name}'")
            else:
                self._s3.spoil(self._bucket, f"states/{name}")

    def lose(self, num_tokens: int) -> None:
        """Deletes the states after so many tokens, but not their rows."""
        with self.place() as place:
            query = f"SELECT name FROM prefix WHERE num_tokens = {num_tokens}"
            place.delete([str(name) for (name,) in self.ask(query)])

    @contextmanager
    def place(self) -> Iterator[Objects]:
        """Where the states are."""
        with connect(self._url) as connection:
            connection.execute(f"SET search_path TO {SCHEMA}".encode())
            yield self._place(connection)

    def close(self) -> None:
        self._open.close()


@pytest.fixture(params=["table", "s3"])
def replicas(request: pytest.FixtureRequest, database_url: str, s3: S3Server) -> Iterator[Replicas]:
    made = Replicas(database_url, s3 if request.param == "s3" else None)
    yield made
    made.close()


def test_what_one_replica_puts_another_finds(replicas: Replicas) -> None:
    one, other = replicas.new(), replicas.new()
    one.put([new(128, 1), new(256, 2), new(300, 3)])
    assert found(other) == (256, 2)  # all 300 would leave nothing to feed
    assert found(other, text=TEXT[:200]) == (128, 1)
    assert (one.num_hits, other.num_hits) == (0, 2)
    assert len(one) == len(other) == 3


def test_what_one_replica_puts_another_finds_by_its_key(replicas: Replicas) -> None:
    one, other = replicas.new(), replicas.new()
    one.put([new(128, 1), new(256, 2)])
    assert not named(other, new(128, 1), owner="b")
    assert not named(other, new(200, 1))
    assert named(other, new(128, 1))
    assert not named(other, new(128, 1)), "it is in memory now"
    assert found(other) == (256, 2)


def test_another_owner_or_text_finds_nothing(replicas: Replicas) -> None:
    one, other = replicas.new(), replicas.new()
    one.put([new(128)])
    assert found(other, owner="b") == (0, 0)
    assert found(other, text=(7, *TEXT[1:])) == (0, 0)
    assert found(other) == (128, 1)


def test_owners_and_texts_are_not_in_the_table(replicas: Replicas) -> None:
    replicas.new().put([new(128, owner="somebody")])
    ((row,),) = replicas.ask("SELECT prefix::text FROM prefix")
    assert "somebody" not in str(row)


def test_short_beginnings_are_neither_put_nor_asked_for(replicas: Replicas) -> None:
    one = replicas.new(min_tokens=200)
    one.put([new(128), new(256, 2)])
    assert replicas.ask("SELECT num_tokens FROM prefix") == [(256,)]
    replicas.new(min_tokens=32).put([new(128)])
    assert found(one, text=TEXT[:250]) == (0, 0)


def test_same_state_is_put_once(replicas: Replicas) -> None:
    one, other = replicas.new(), replicas.new()
    one.put([new(128), new(128)])
    other.put([new(128)])
    assert len(replicas.objects()) == 1
    assert replicas.objects() == replicas.rows()
    assert replicas.garbage() == set()


def test_two_that_put_the_same_at_once_leave_one(replicas: Replicas) -> None:
    other = replicas.new()
    one = replicas.new(after_put=lambda: other.put([new(128, 2)]), grace_s=600.0)
    one.put([new(128, 1)])
    assert found(replicas.new()) == (128, 2)
    assert len(replicas.objects()) == 1
    assert replicas.objects() == replicas.rows()
    assert replicas.garbage() == set()


def test_entry_in_memory_is_shared_and_not_returned_to_its_holder(replicas: Replicas) -> None:
    one, other = replicas.new(kept_s=100.0), replicas.new(kept_s=100.0)
    one.put([new(128, kept=True)])
    assert found(one) == (0, 0)
    assert found(other) == (128, 1)
    assert found(other) == (0, 0)  # it has it by now
    other.put([new(128, kept=True)])  # which it says
    assert found(other) == (0, 0)
    other.put([new(128)])  # and that it has let it go
    assert found(other) == (128, 1)
    replicas.clock.now_s += 101.0  # it may never have been told
    assert found(one) == (128, 1)


def test_longer_entry_of_another_is_returned_despite_one_in_memory(replicas: Replicas) -> None:
    one, other = replicas.new(), replicas.new()
    one.put([new(128, kept=True)])
    other.put([new(256, 2)])
    assert found(one) == (256, 2)


def test_least_recently_used_is_evicted_first_across_replicas(replicas: Replicas) -> None:
    size = sum(memoryview(part).nbytes for part in encode_prefix(new(128).prefix, IDENTITY))
    one, other = (replicas.new(max_bytes=2 * size + 1) for _ in range(2))
    one.put([new(128, 1), new(256, 2)])
    assert found(replicas.new(), text=TEXT[:200]) == (128, 1)
    other.put([new(290, 3)])
    assert len(one) == 2
    assert replicas.objects() == replicas.rows()
    assert replicas.garbage() == set()
    assert found(replicas.new(), text=TEXT[:280]) == (128, 1)
    assert found(replicas.new()) == (290, 3)


def test_lower_limit_evicts_any_number_of_entries(replicas: Replicas) -> None:
    texts = [(token, *TEXT) for token in range(70)]
    replicas.new().put([new(128, token, text=text) for token, text in enumerate(texts)])
    size = sum(memoryview(part).nbytes for part in encode_prefix(new(128).prefix, IDENTITY))
    one = replicas.new(max_bytes=2 * size)
    one.put([new(128, 70)])
    assert len(one) == 2
    assert found(one) == (128, 70)
    assert found(one, text=texts[-1]) == (128, 69)
    assert replicas.objects() == replicas.rows()


def test_entry_larger_than_the_limit_is_not_stored(replicas: Replicas) -> None:
    replicas.new(max_bytes=10).put([new(128)])
    assert replicas.objects() == replicas.rows() == replicas.garbage() == set()


def test_limit_counts_the_states_of_other_models(replicas: Replicas) -> None:
    size = sum(memoryview(part).nbytes for part in encode_prefix(new(128).prefix, IDENTITY))
    old = replicas.new(replace(IDENTITY, model="old"))
    present = replicas.new(max_bytes=size * 3 // 2)
    old.put([new(128)])
    present.put([new(128)])
    assert (len(old), len(present)) == (0, 1)


@pytest.mark.parametrize("harm", [Replicas.spoil, Replicas.lose])
def test_broken_or_lost_state_is_removed_and_was_never_there(
    replicas: Replicas, harm: Callable[[Replicas, int], None]
) -> None:
    replicas.new().put([new(128, 1), new(256, 2)])
    harm(replicas, 256)
    one = replicas.new()
    assert found(one) == (128, 1)
    assert len(one) == 1
    one.sweep()
    assert replicas.objects() == replicas.rows()


@pytest.mark.parametrize("field", ["model", "tokenizer", "backend", "dtype", "layout"])
def test_states_of_another_identity_are_not_used(database_url: str, field: str) -> None:
    replicas = Replicas(database_url, None)
    replicas.new().put([new(128)])
    identity = replace(IDENTITY, **{field: "other"})  # type: ignore[arg-type]
    other = replicas.new(identity)
    assert found(other) == (0, 0)
    assert found(replicas.new()) == (128, 1)
    # Even where a row says so: the state itself has the last word.
    other.put([new(256)])
    replicas.run("UPDATE prefix SET space = (SELECT space FROM prefix WHERE num_tokens = 256)")
    assert found(replicas.new(identity)) == (256, 1)
    assert found(replicas.new(identity), text=TEXT[:200]) == (0, 0)
    assert replicas.ask("SELECT num_tokens FROM prefix") == [(256,)]
    replicas.close()


# Crashes


def test_object_without_a_row_is_swept_after_a_crash(replicas: Replicas) -> None:
    with pytest.raises(Crash):
        replicas.new(after_put=crash).put([new(128)])
    replicas.new(grace_s=600.0).sweep()
    replicas.new().sweep()
    assert replicas.objects() == replicas.garbage() == set()
    assert found(replicas.new()) == (0, 0)


def test_pending_object_is_not_swept_within_the_grace_period(replicas: Replicas) -> None:
    sweeper = replicas.new()
    one = replicas.new(after_put=sweeper.sweep, grace_s=600.0)
    one.put([new(128)])
    assert found(replicas.new()) == (128, 1)


def test_pending_object_that_was_swept_gets_no_row(replicas: Replicas) -> None:
    sweeper = replicas.new()
    replicas.new(after_put=sweeper.sweep, grace_s=0.0).put([new(128)])
    assert replicas.objects() == replicas.rows() == replicas.garbage() == set()


def test_sweep_completes_one_that_crashed(replicas: Replicas) -> None:
    one = replicas.new(after_delete=crash)
    one.put([new(128)])
    replicas.run(
        "WITH gone AS (DELETE FROM prefix RETURNING name)"
        " INSERT INTO garbage SELECT name, 0 FROM gone"
    )
    with pytest.raises(Crash):
        one.sweep()
    assert len(replicas.garbage()) == 1
    replicas.new().sweep()
    assert replicas.objects() == replicas.garbage() == set()


def test_names_of_sessions_states_are_left_alone(replicas: Replicas) -> None:
    """In `garbage` they may be in use: a snapshot's name stays there until it is looked at."""
    with replicas.place() as place:
        place.put("0123456789abcdef", [b"a session"])
    replicas.run("INSERT INTO garbage VALUES ('0123456789abcdef', 0)")
    one = replicas.new()
    one.put([new(128)])
    one.sweep()
    assert replicas.objects() == {"0123456789abcdef", *replicas.rows()}
    assert replicas.garbage() == {"0123456789abcdef"}


# A store that does not answer


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """One that a test may break."""
    server = Postgres()
    server.start()
    yield server
    server.close()


def test_database_that_is_down_finds_nothing_and_comes_back(
    own_postgres: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = Replicas(own_postgres.new_database(), None)
    one = replicas.new(rest_s=5.0)
    one.put([new(128)])
    replicas.close()
    own_postgres.stop()
    with caplog.at_level(logging.WARNING):
        assert found(one) == (0, 0)
        one.put([new(256)])
        one.sweep()
        assert len(one) == 0
    assert len(caplog.records) == 1  # the others did not even ask
    own_postgres.start()
    assert found(one) == (0, 0)
    replicas.clock.now_s += 6.0
    assert found(one) == (128, 1)
    one.close()


def test_database_that_hangs_finds_nothing_in_bounded_time(own_postgres: Postgres) -> None:
    replicas = Replicas(own_postgres.new_database(), None)
    one = replicas.new()
    one.put([new(128)])
    own_postgres.pause()
    assert found(one) == (0, 0)
    own_postgres.go_on()
    replicas.clock.now_s += 6.0
    assert found(one) == (128, 1)
    replicas.close()


def test_object_storage_that_is_down_finds_nothing_and_comes_back(
    database_url: str, own_s3: S3Server
) -> None:
    replicas = Replicas(database_url, own_s3)
    one = replicas.new()
    one.put([new(128)])
    own_s3.kill()
    assert found(one) == (0, 0)
    replicas.clock.now_s += 6.0
    one.put([new(256)])
    own_s3.start()
    assert found(one) == (0, 0)
    replicas.clock.now_s += 6.0
    assert found(one) == (128, 1)
    one.sweep()
    assert replicas.objects() == replicas.rows()
    replicas.close()
