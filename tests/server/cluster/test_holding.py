"""Whose a session is: two replicas on one database, and never two that write."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest

from server.engine.types import TokenEvent
from server.errors import SessionNotFound
from server.runtime.async_engine import STALL_S
from server.store.base import Fenced, HeldElsewhere, StoreFailed, StoreLost
from server.store.postgres import database, link, store
from tests.postgres import STUCK_S, Postgres
from tests.server.cluster.stores import Join, check_whole, linked
from tests.server.store.records import Writer, block, in_ticks


def test_each_replica_has_a_key_of_its_own(join: Join) -> None:
    one, other = join(), join()
    assert one.store_id == other.store_id
    assert one.key != other.key


def test_owned_session_cannot_be_loaded_by_another(join: Join) -> None:
    one, other = join(), join()
    writer = Writer()
    one.commit([writer.opened(), *writer.turn(3)])
    with pytest.raises(HeldElsewhere) as held:
        other.load("s1", "ann")
    assert held.value.replica == one.key


def test_an_unknown_session_and_a_foreign_one_are_the_same(join: Join) -> None:
    one, other = join(), join()
    writer = Writer()
    one.commit([writer.opened()])
    for session, owner in (("s1", "bob"), ("s2", "ann")):
        with pytest.raises(SessionNotFound):
            other.load(session, owner)
        with pytest.raises(SessionNotFound):
            other.read(session, owner, 0, 10)


def test_session_of_another_can_be_read_to_its_last_token(join: Join) -> None:
    one, other = join(), join()
    writer = Writer()
    in_ticks(one, [writer.opened(), *writer.turn(300), *writer.turn(300)])
    one.maintain(0.0)
    tokens = [entry for entry in writer.entries if hasattr(entry, "seq") and entry.seq > 290]
    read = other.read("s1", "ann", 290, 1000)
    assert [event.seq for event in read] == list(range(291, writer.value.seq + 1))
    assert read == [entry for entry in tokens if entry in read]
    assert other.log_end("s1", "ann") == one.log_end("s1", "ann") == len(writer.entries)


@pytest.mark.parametrize("num_tokens", [1, 300, 1500])
def test_evicted_session_continues_at_another_replica(join: Join, num_tokens: int) -> None:
    one, other = join(), join()
    writer = Writer()
    in_ticks(one, [writer.opened(), *writer.turn(num_tokens)])
    one.commit([writer.accepted(), *writer.tokens(2), writer.saved(evicted=True)])
    loaded = other.load("s1", "ann")
    assert loaded.entries == []
    assert loaded.value.state is not None
    assert loaded.value.state.data.tolist() == block(writer.value.position).data.tolist()
    other.commit([*writer.tokens(2)])
    check_whole(other, writer)
    with pytest.raises(HeldElsewhere):
        one.load("s1", "ann")


def test_former_holder_cannot_write_to_a_session(join: Join) -> None:
    one, other = join(), join()
    writer = Writer()
    one.commit([writer.opened(), writer.saved(evicted=True)])
    other.load("s1", "ann")
    with pytest.raises(StoreLost):
        one.commit([writer.accepted()])


def test_a_journal_entry_of_another_s_session_is_refused_by_the_database(join: Join) -> None:
    """Should a replica ever be wrong about what it holds."""
    one, other = join(), join()
    writer = Writer()
    one.commit([writer.opened(), *writer.turn(3)])
    with linked(one).database.transaction():
        linked(one).database.execute("UPDATE session SET holder = ?", (other.key,))
    with pytest.raises(StoreLost):
        one.commit([writer.accepted()])


def test_released_session_can_be_loaded_by_another(join: Join) -> None:
    one, other = join(), join()
    writer = Writer()
    in_ticks(one, [writer.opened(), *writer.turn(5)])
    one.release("s1")
    check_whole(other, writer)


def test_session_can_move_back_and_forth(join: Join) -> None:
    one, other = join(), join()
    writer = Writer()
    in_ticks(one, [writer.opened(), *writer.turn(400)])
    for holder, next_one in ((one, other), (other, one), (one, other), (other, one)):
        holder.release("s1")
        check_whole(next_one, writer)
        in_ticks(next_one, writer.turn(100))
    check_whole(one, writer)


class TestReclaim:
    def test_sessions_of_a_dead_replica_have_no_holder(self, join: Join) -> None:
        one, other = join(), join()
        writer = Writer()
        in_ticks(one, [writer.opened(), *writer.turn(700), writer.accepted(), *writer.tokens(3)])
        assert other.reclaim(one.key)
        assert other.unfinished() == [("s1", "ann")]
        check_whole(other, writer)

    def test_reclaimed_replica_is_fenced(self, join: Join) -> None:
        one, other = join(), join()
        writer = Writer()
        one.commit([writer.opened()])
        other.reclaim(one.key)
        with pytest.raises(Fenced):
            one.commit([writer.accepted()])
        with pytest.raises(Fenced):
            one.maintain(0.0)
        assert other.load("s1", "ann").value.length == 0

    @pytest.mark.parametrize("replica_survives", [True, False])
    def test_session_with_an_unsettled_commit_is_recovered(
        self, join: Join, replica_survives: bool
    ) -> None:
        """The replica ends, or its connection, after a commit and before what follows from it."""
        one, other = join(), join()
        writer = Writer()
        linked(one).log.append([writer.opened(block(2), (1, 2)), *writer.turn(2)])
        if replica_survives:
            one._link.abandon()
            check_whole(one, writer)
        else:
            other.reclaim(one.key)
            check_whole(other, writer)

    @pytest.mark.parametrize("in_pipeline", [False, True])
    def test_replica_stopped_within_a_transaction_does_not_block_others(
        self, join: Join, in_pipeline: bool
    ) -> None:
        """The database has no limit of time for a transaction that waits for a Sync."""
        one, other = join(), join()
        writer, another = Writer(), Writer("s2")
        in_ticks(one, [writer.opened(), *writer.turn(2)])
        database = linked(one).database
        transaction = database.transaction()
        transaction.__enter__()
        execute = database.connection.execute if in_pipeline else database.execute
        assert execute("SELECT 1").fetchall() == [(1,)]
        while not other.reclaim(one.key):
            in_ticks(other, [another.opened(), another.deleted()])
        with pytest.raises(psycopg.Error):
            transaction.__exit__(None, None, None)
        check_whole(other, writer)

    def test_slow_reclaim_is_not_taken_for_a_stuck_one(
        self, join: Join, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two watch each replica: they would end each other's attempts endlessly."""
        monkeypatch.setattr(store, "STUCK_S", 2)
        one, other, third = join(), join(), join()
        database = linked(other).database
        with database.transaction(pipelined=False):
            lock = "SELECT pg_advisory_xact_lock(hashtext(current_schema()), ?::int)"
            database.execute(lock, (one.key,))
            until = time.monotonic() + 3
            while time.monotonic() < until:
                database.execute("SELECT pg_sleep(0.05)")
                assert not third.reclaim(one.key)
        assert third.reclaim(one.key)

    def test_second_reclaim_does_nothing(self, join: Join) -> None:
        one, other, third = join(), join(), join()
        assert other.reclaim(one.key)
        assert not third.reclaim(one.key)

    def test_session_that_it_released_stays_with_the_new_holder(self, join: Join) -> None:
        """Its journal still has the session's first entries, numbered as only it understands."""
        one, other, third = join(), join(), join()
        writer = Writer()
        in_ticks(one, [writer.opened(), *writer.turn(10)])
        one.release("s1")
        other.load("s1", "ann")
        in_ticks(other, writer.turn(10))
        assert third.reclaim(one.key)
        in_ticks(other, writer.turn(10))
        check_whole(other, writer)

    def test_session_that_it_took_over_keeps_later_entries(self, join: Join) -> None:
        """Its rows are numbered from the beginning again, below those of the one before it."""
        one, other = join(), join()
        writer, noise = Writer(), Writer("s2")
        in_ticks(one, [noise.opened(), *noise.turn(50)])
        in_ticks(one, [writer.opened(), *writer.turn(10)])
        one.release("s1")
        third = join()
        third.load("s1", "ann")
        in_ticks(third, writer.turn(10))
        assert other.reclaim(third.key)
        check_whole(other, writer)

    def test_deleted_session_stays_deleted(self, join: Join) -> None:
        one, other = join(), join()
        writer = Writer()
        in_ticks(one, [writer.opened(), *writer.turn(3)])
        one.release("s1")
        other.load("s1", "ann")
        other.commit([writer.deleted()])
        other.reclaim(one.key)
        with pytest.raises(SessionNotFound):
            other.load("s1", "ann")

    def test_key_of_its_unfinished_request_is_found(self, join: Join) -> None:
        one, other = join(), join()
        writer = Writer()
        one.commit([writer.opened(), writer.accepted(key="k"), *writer.tokens(2)])
        other.reclaim(one.key)
        found = other.find_key("ann", "k")
        assert found is not None
        assert (found.session, found.finished) == ("s1", None)


def test_closing_replica_releases_all_sessions(join: Join) -> None:
    one, other = join(), join()
    writer = Writer()
    in_ticks(one, [writer.opened(), *writer.turn(5), writer.saved(), writer.accepted()])
    one.close()
    check_whole(other, writer)
    assert not other.reclaim(one.key)


def test_a_state_that_two_sessions_share_outlives_one_of_them(join: Join) -> None:
    one, other = join(), join()
    state, writer, fork = block(5), Writer("s1"), Writer("s2")
    one.commit([writer.opened(state, (1, 2, 3, 4, 5)), fork.opened(state, (1, 2, 3, 4, 5))])
    one.release("s1")
    one.release("s2")
    other.load("s1", "ann")
    other.commit([writer.deleted()])
    loaded = other.load("s2", "ann")
    assert loaded.value.state is not None
    assert loaded.value.state.data.tolist() == state.data.tolist()


class TestKeys:
    def test_only_one_replica_can_claim_a_key(self, join: Join) -> None:
        one, other = join(), join()
        assert one.claim_key("ann", "k")
        assert not other.claim_key("ann", "k")
        assert other.claim_key("bob", "k")
        one.give_back_key("ann", "k")
        assert other.claim_key("ann", "k")

    def test_only_the_claimant_can_release_a_key(self, join: Join) -> None:
        one, other = join(), join()
        one.claim_key("ann", "k")
        other.give_back_key("ann", "k")
        assert not other.claim_key("ann", "k")

    def test_key_of_a_dead_replica_can_be_claimed(self, join: Join) -> None:
        one, other = join(), join()
        one.claim_key("ann", "k")
        other.reclaim(one.key)
        assert other.claim_key("ann", "k")


class TestDatabase:
    def test_a_crash_loses_nothing_that_was_committed(self, join: Join, postgres: Postgres) -> None:
        one = join()
        writer = Writer()
        in_ticks(one, [writer.opened(), *writer.turn(300), writer.accepted(), writer.token()])
        postgres.kill()
        postgres.start()
        in_ticks(one, [*writer.tokens(300)])
        check_whole(one, writer)

    def test_a_lost_connection_is_made_again(self, join: Join, postgres: Postgres) -> None:
        one, other = join(), join()
        writer = Writer()
        in_ticks(one, [writer.opened(), *writer.turn(3)])
        postgres.psql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        )
        in_ticks(one, writer.turn(3))
        check_whole(one, writer)
        with pytest.raises(HeldElsewhere):
            other.load("s1", "ann")

    def test_unacknowledged_commit_is_undone_and_retried(self, join: Join) -> None:
        """The connection goes after the database has committed and before it says so."""
        one = join()
        writer = Writer()
        records = [writer.opened(block(3), (1, 2, 3)), *writer.turn(2)]
        log = linked(one).log
        known = log.last_row, log.next_key
        log.append(records)
        log.last_row, log.next_key = known
        one._link.abandon()
        one.commit(records)
        check_whole(one, writer)
        assert len(one.list(None, None, 10)) == 1

    @pytest.mark.parametrize("reconnects", [True, False])
    def test_a_database_that_has_lost_commits_ends_its_replica(
        self, join: Join, reconnects: bool
    ) -> None:
        """A standby that was promoted too early, which a pooler may hide: none builds on a gap."""
        one = join()
        writer = Writer()
        in_ticks(one, [writer.opened(), writer.accepted(), *writer.tokens(2)])
        last = linked(one).log.last_row
        linked(one).database.execute("DELETE FROM journal WHERE id = ?", (last,))
        if reconnects:
            one._link.abandon()
        with pytest.raises(Fenced, match="lost what this replica had committed"):
            one.commit([writer.token()])

    def test_sessions_that_the_engine_has_forgotten_are_released(self, join: Join) -> None:
        one, other = join(), join()
        writer, used = Writer(), Writer("s2")
        one.commit([writer.opened(), *writer.turn(2), used.opened()])
        one.forget()
        one.load("s2", "ann")
        one.maintain(0.0)
        check_whole(other, writer)
        with pytest.raises(HeldElsewhere):
            other.load("s2", "ann")

    def test_hanging_database_is_waited_for_once_and_connected_to_once(
        self, join: Join, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Below what makes the server look dead, however many wait."""
        assert database.TIMEOUT_S + database.CONNECT_TIMEOUT_S < STALL_S
        one = join()
        writer = Writer()
        one.commit([writer.opened()])
        causes: list[str] = []
        connect = database.connect

        def counted(*arguments: Any, **options: Any) -> Any:
            causes.append("connect")
            return connect(*arguments, **options)

        monkeypatch.setattr(database, "connect", counted)
        monkeypatch.setattr(link, "REST_S", STUCK_S)  # longer than this machine can be busy
        postgres.pause()
        try:
            for _ in range(5):
                with pytest.raises(StoreFailed) as failed:
                    one.commit([writer.accepted()])
                causes.append(type(failed.value.__cause__).__name__)
        finally:
            postgres.go_on()
        assert causes == ["Hung", "connect", *["NoneType"] * 4]

    def test_what_an_older_connection_still_sends_is_refused(self, join: Join) -> None:
        one = join()
        writer = Writer()
        one.commit([writer.opened()])
        old = linked(one).database
        row = (old.me, old.link, 77, b"[]", "", "{}", True)
        one._link.abandon()
        one.maintain(0.0)
        assert linked(one).database.call("append_journal", row) == 1

    def test_an_emptied_database_is_another_store(self, join: Join, postgres: Postgres) -> None:
        one = join()
        writer = Writer()
        one.commit([writer.opened(), *writer.turn(2)])
        before, key = one.store_id, one.key
        linked(one).database.run('DROP SCHEMA "everstream_test" CASCADE')
        with pytest.raises(Exception, match="shared store"):
            one.commit([writer.accepted()])
        one.maintain(0.0)
        assert one.store_id != before
        assert one.key != 0
        with pytest.raises(StoreLost):
            one.commit([writer.accepted()])
        assert key


def test_tokens_of_many_sessions_are_one_row(join: Join) -> None:
    one = join()
    writers = [Writer(f"s{number}") for number in range(64)]
    one.commit([writer.opened() for writer in writers])
    one.commit([writer.accepted() for writer in writers])
    row = linked(one).log.last_row
    one.commit([writer.token() for writer in writers])
    assert linked(one).log.last_row == row + 1
    assert all(isinstance(w.entries[-1], TokenEvent) for w in writers)
