"""What errors of the database cost: an outage nothing that was promised, a row its own session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from psycopg import sql

from server.engine.types import Event, Failed, Started, TokenEvent
from server.errors import RequestError
from server.runtime.queues import EventQueue
from server.runtime.threads import commit_apart
from server.sessions.sessions import Sessions
from server.store.base import SessionBroken, StoreFailed, StoreFull
from server.store.postgres.store import PostgresStore
from tests.fakes import FakeEngine
from tests.reliability.servers import STUCK_S
from tests.server.cluster.stores import check_whole, fake_place
from tests.server.running_engine import driving, request
from tests.server.store.records import Writer

#: Raised by the next inserts into the journal, as many as are allowed to fail.
_FAULT = """
    CREATE SEQUENCE everstream_test.fault;
    CREATE FUNCTION everstream_test.fail() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF nextval('everstream_test.fault') <= {count} THEN
            RAISE EXCEPTION 'a fault' USING ERRCODE = {code};
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER fault BEFORE INSERT ON everstream_test.journal
        FOR EACH ROW EXECUTE FUNCTION everstream_test.fail();
"""
_RECONNECT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
OUTAGE = 1000


class Administrator:
    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)

    def fail(self, code: str, count: int) -> None:
        self._connection.execute(sql.SQL(_FAULT).format(count=count, code=sql.Literal(code)))

    def repair(self) -> None:
        self._connection.execute("DROP TRIGGER fault ON everstream_test.journal")

    def make_read_only(self, value: bool) -> None:
        """For all connections that are made from here on, and there are no others."""
        name = sql.Identifier(self._connection.info.dbname)
        setting = sql.Literal("on" if value else "off")
        change = sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = {}")
        self._connection.execute("SET default_transaction_read_only = off")
        self._connection.execute(change.format(name, setting))
        self._connection.execute(_RECONNECT)

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def administrator(store: PostgresStore, database_url: str) -> Iterator[Administrator]:
    with closing(Administrator(database_url)) as administrator:
        yield administrator


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("25P03", id="idle_in_transaction_session_timeout"),
        pytest.param("40001", id="serialization_failure"),
        pytest.param("40P01", id="deadlock_detected"),
        pytest.param("55P03", id="lock_not_available"),
        pytest.param("57014", id="query_canceled"),
    ],
)
def test_error_that_passes_costs_nothing(
    store: PostgresStore, administrator: Administrator, code: str
) -> None:
    writer = Writer()
    store.commit([writer.opened(), *writer.turn(2)])
    administrator.fail(code, 1)
    assert commit_apart(store, writer.turn(2)) == {}
    check_whole(store, writer)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        pytest.param("53100", StoreFull, id="disk_full"),
        pytest.param("53200", StoreFailed, id="out_of_memory"),
        pytest.param("57014", StoreFailed, id="query_canceled"),
        pytest.param("XX002", StoreFailed, id="index_corrupted"),
    ],
)
def test_outage_is_one_of_all_sessions_and_none_is_blamed(
    store: PostgresStore, administrator: Administrator, code: str, kind: type[RequestError]
) -> None:
    writers = [Writer("s1"), Writer("s2")]
    store.commit([record for writer in writers for record in [writer.opened(), *writer.turn(2)]])
    administrator.fail(code, OUTAGE)
    records = [record for writer in writers for record in writer.turn(2)]
    with pytest.raises(kind):
        commit_apart(store, records)
    administrator.repair()
    store.maintain(1.0)
    assert commit_apart(store, records) == {}
    for writer in writers:
        check_whole(store, writer)


def test_database_that_can_only_be_read_fails_until_it_can_be_written(
    store: PostgresStore, administrator: Administrator
) -> None:
    writer = Writer()
    store.commit([writer.opened(), *writer.turn(2)])
    administrator.make_read_only(True)
    records = writer.turn(2)
    with pytest.raises(StoreFailed, match="read-only"):
        commit_apart(store, records)
    administrator.make_read_only(False)
    store._link._rests_until_s = 0.0  # as half a second later
    assert commit_apart(store, records) == {}
    check_whole(store, writer)


async def test_streams_of_others_go_on_after_a_row_that_is_refused(database_url: str) -> None:
    """The row comes from a client, below the checks of what clients send."""
    store = await asyncio.to_thread(PostgresStore, fake_place(database_url))
    async with driving(FakeEngine(), store=store) as async_engine:
        sessions = Sessions(async_engine)
        other: EventQueue[Event] = EventQueue(10**6)
        bad: EventQueue[Event] = EventQueue(10**6)
        await sessions.submit(request("other", 10**6, keep=True), other)
        await sessions.submit(request("a\0b", 10**6, keep=True, key="k"), bad)
        async with asyncio.timeout(STUCK_S):
            before = await other.take()
            failed = await _events_to_failure(bad)
            assert async_engine.store_works
            after = [*await other.take(), *await other.take()]
            async_engine.requests.cancel("other")
        _, *tokens = before + after
        assert all(isinstance(event, TokenEvent) for event in tokens)
        seqs = [event.seq for event in tokens if isinstance(event, TokenEvent)]
        assert seqs == list(range(1, len(seqs) + 1))
        id = _session_of(failed)
        with pytest.raises(SessionBroken):
            await sessions.info(id, "me")
        await sessions.delete(id, "me")
        (left,) = await sessions.listed("me", None, 9)
        assert left.id == _session_of(before)


async def _events_to_failure(event_queue: EventQueue[Event]) -> list[Event]:
    events: list[Event] = []
    while not any(isinstance(event, Failed) for event in events):
        events += await event_queue.take()
    return events


def _session_of(events: list[Event]) -> str:
    (session,) = (event.session for event in events if isinstance(event, Started))
    return session
