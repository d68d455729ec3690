"""What is the disk store's own: closing and opening, files, failures, and an emptied directory."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import apsw
import numpy as np
import pytest

from server.engine.session import Deleted, Saved, StateBlock
from server.store.base import SessionBroken, StoreError, StoreFailed, StoreFull, StoreLost
from server.store.sqlite.database import DATABASE_FILE, SAVES_AT_ONCE
from server.store.sqlite.maintenance import problems
from server.store.sqlite.store import SqliteStore, open_store
from server.store.table_store import StoreLimits
from tests.server.store.faults import Faults, FaultyFiles, FaultyVfs
from tests.server.store.records import IDENTITY, Writer, block, key_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    made = open_store(path, IDENTITY)
    yield made
    made.close()
    assert list(problems(path)) == []


def died(path: Path) -> Path:
    """The directory as a process leaves it that dies now."""
    copy = path.with_name(path.name + "-dead")
    shutil.copytree(path, copy)
    return copy


def state_files(path: Path) -> list[Path]:
    return sorted(file for file in path.glob("snapshots/*/*"))


class TestForks:
    def test_file_of_a_fork_that_is_deleted_serves_the_next_one(
        self, store: SqliteStore, path: Path
    ) -> None:
        """A later copy of the same state is not written again."""
        parent, one, two = Writer("parent"), Writer("one"), Writer("two")
        state = block(5)
        store.commit([parent.opened(), *parent.turn(3)])
        text = tuple(parent.text)
        saved = (parent.id, Saved(replace(parent.value, state=state)))
        store.commit([one.opened(state, text), saved])
        store.maintain(0.0)
        (file,) = state_files(path)
        store.commit([one.deleted()])
        store.maintain(1.0)
        again = block(5)
        again.stored = state.stored
        store.commit([two.opened(again, text)])
        assert state_files(path) == [file]
        loaded = store.load("two", "ann").value.state
        assert loaded is not None
        assert bytes(loaded.data) == bytes(state.data)


class TestReopening:
    def test_waits_for_a_lock_that_another_process_holds(self, path: Path) -> None:
        open_store(path, IDENTITY).close()
        with closing(apsw.Connection(str(path / DATABASE_FILE))) as other:
            other.execute("BEGIN IMMEDIATE")
            with ThreadPoolExecutor() as threads:
                opening = threads.submit(lambda: open_store(path, IDENTITY).close())
                wait([opening], timeout=0.3)  # it fails at once where it does not wait
                other.execute("ROLLBACK")
                assert opening.result() is None

    def test_a_closed_store_has_everything(self, path: Path) -> None:
        store, writer = open_store(path, IDENTITY), Writer()
        store.commit([writer.opened(), *writer.turn(3, key="k"), writer.saved(evicted=True)])
        store.close()
        again = open_store(path, IDENTITY)
        assert again.store_id == store.store_id
        loaded = again.load("s1", "ann")
        assert (loaded.value.length, loaded.entries) == (5, [])
        assert [event.seq for event in again.read("s1", "ann", 0, 9)] == [1, 2, 3, 4]
        assert key_of(again, "k")
        again.close()

    def test_a_store_that_died_has_everything(self, store: SqliteStore, path: Path) -> None:
        writer, brief = Writer(), Writer("s2")
        store.commit([writer.opened(), brief.opened(block(3), (1, 2, 3))])
        store.maintain(0.0)
        store.commit([*writer.turn(3, key="k"), *brief.turn(1)])
        store.commit([writer.accepted(key="l"), *writer.tokens(300), brief.deleted()])
        store.maintain(1.0)
        store.commit(writer.tokens(3))
        store.maintain(2.0)
        again = open_store(died(path), IDENTITY)
        (listed,) = again.list(None, None, 9)
        assert (listed.length, listed.seq, listed.unfinished) == (310, 307, True)
        assert again.load("s1", "ann").entries == writer.entries
        assert again.unfinished() == [("s1", "ann")]
        keyed = key_of(again, "k")
        assert keyed.finished == writer.entries[4]
        writer.finished()
        again.close()

    def test_row_numbers_continue_after_a_crash(self, store: SqliteStore, path: Path) -> None:
        """No row of the journal and no session's key is used twice."""
        first, second = Writer("s1"), Writer("s2")
        store.commit([first.opened(), *first.turn(2)])
        store.commit([first.deleted()])
        store.maintain(0.0)
        again = open_store(died(path), IDENTITY)
        again.commit([second.opened(), second.accepted()])
        twice = open_store(died(path.with_name("store-dead")), IDENTITY)
        assert [each.id for each in twice.list(None, None, 9)] == ["s2"]
        assert twice.load("s2", "ann").entries == second.entries
        twice.close()
        again.close()

    def test_a_session_is_not_brought_back_from_the_journal(
        self, store: SqliteStore, path: Path
    ) -> None:
        expiring = open_store(path.with_name("other"), IDENTITY, limits=StoreLimits(retention_s=10))
        writer, busy = Writer("s1"), Writer("s2")
        expiring.maintain(0.0)
        expiring.commit([busy.opened(), busy.accepted()])  # keeps the journal's rows
        expiring.commit([writer.opened(), *writer.turn(1), writer.saved(evicted=True)])
        expiring.maintain(20.0)
        expiring.maintain(21.0)
        again = open_store(died(path.with_name("other")), IDENTITY)
        assert [each.id for each in again.list(None, None, 9)] == ["s2"]
        again.close()
        expiring.close()


class TestJournal:
    def test_idle_session_does_not_block_the_journal(self, path: Path) -> None:
        store = open_store(path, IDENTITY, "relaxed")
        quiet, busy = Writer("quiet"), Writer("busy")
        store.commit([quiet.opened(), quiet.accepted(), busy.opened(), busy.accepted()])
        for _ in range(4200):
            store.commit([busy.token()])
        store.maintain(0.0)
        store.maintain(1.0)
        reader = sqlite3.connect(path / "sessions.sqlite3")
        ((rows,),) = reader.execute("SELECT count(*) FROM journal")
        reader.close()
        assert rows < 1000
        assert store.load("quiet", "ann").entries == quiet.entries
        assert store.load("busy", "ann").entries == busy.entries
        store.close()

    def test_log_and_database_stay_small(self, store: SqliteStore, path: Path) -> None:
        for turn in range(40):
            writer = Writer(f"s{turn}")
            store.commit([writer.opened(), *writer.turn(300)])
            store.commit([writer.deleted()])
            store.maintain(float(turn))
        size = sum(file.stat().st_size for file in path.glob("sessions.sqlite3*"))
        assert size < 4 << 20


class TestFiles:
    def test_a_shared_state_is_written_once(self, store: SqliteStore, path: Path) -> None:
        state = block(3)
        copies = [Writer(f"s{i}") for i in range(5)]
        store.commit([copy.opened(state, (1, 2, 3)) for copy in copies[:3]])
        store.commit([copy.opened(state, (1, 2, 3)) for copy in copies[3:]])
        assert len(state_files(path)) == 1
        for copy in copies[:4]:
            store.commit([copy.deleted()])
            store.maintain(0.0)
        assert len(state_files(path)) == 1
        assert store.load("s4", "ann").value.state is not None
        store.commit([copies[4].deleted()])
        store.maintain(1.0)
        assert state_files(path) == []

    def test_a_fork_of_what_was_loaded_shares_its_file(
        self, store: SqliteStore, path: Path
    ) -> None:
        writer = Writer()
        store.commit([writer.opened(block(3), (1, 2, 3))])
        state = store.load("s1", "ann").value.state
        store.commit([Writer("s2").opened(state, (1, 2, 3))])
        assert len(state_files(path)) == 1

    def test_a_state_whose_file_is_gone_is_written_again(
        self, store: SqliteStore, path: Path
    ) -> None:
        state = block(3)
        store.commit([Writer("s1").opened(state, (1, 2, 3))])
        store.commit([("s1", Deleted())])
        store.maintain(0.0)
        store.commit([Writer("s2").opened(state, (1, 2, 3))])
        assert store.load("s2", "ann").value.state is not None

    def test_few_snapshots_of_a_long_session_are_kept(self, store: SqliteStore, path: Path) -> None:
        writer = Writer()
        store.commit([writer.opened()])
        for turn in range(60):
            store.commit([*writer.turn(1), writer.saved()])
            store.maintain(float(turn))
        assert 4 <= len(state_files(path)) <= 12

    def test_leftovers_are_deleted_at_start(self, path: Path) -> None:
        store = open_store(path, IDENTITY)
        store.commit([Writer().opened(block(3), (1, 2, 3))])
        store.close()
        (kept,) = state_files(path)
        for name in ("00/x.safetensors", "00/y.safetensors.new"):
            (path / "snapshots" / name).parent.mkdir(exist_ok=True)
            (path / "snapshots" / name).write_bytes(b"x")
        open_store(path, IDENTITY).close()
        assert state_files(path) == [kept]

    def test_states_that_do_not_fit_memory_are_written_at_the_commit(self, path: Path) -> None:
        store = open_store(path, IDENTITY, "relaxed")
        writer = Writer()
        store.commit([writer.opened()])
        large = replace(writer.value, state=StateBlock(np.zeros(65 << 20, dtype=np.uint8)))
        store.commit([("s1", Saved(large))])
        assert len(state_files(path)) == 1
        store.close()


class TestFailures:
    def test_a_full_disk_refuses_and_recovers(self, path: Path) -> None:
        faults = Faults(code=errno.ENOSPC, lasting=True)
        vfs = FaultyVfs(faults)
        store = open_store(path, IDENTITY, files=FaultyFiles(faults), vfs=vfs.name)
        writer = Writer()
        store.commit([writer.opened(), writer.accepted()])
        token = writer.token()
        faults.at = faults.count + 1
        for _ in range(3):
            with pytest.raises(StoreFull):
                store.commit([token])
        assert store.read("s1", "ann", 0, 9) == []
        faults.heal()
        store.commit([token])
        assert [event.seq for event in store.read("s1", "ann", 0, 9)] == [1]
        store.close()

    def test_commit_with_a_failed_sync_is_not_recovered_later(self, path: Path) -> None:
        """The bytes are in the file, and only the sync has failed: the commit is not there."""
        faults = Faults()
        vfs = FaultyVfs(faults)
        store = open_store(path, IDENTITY, files=FaultyFiles(faults), vfs=vfs.name)
        writer = Writer()
        store.commit([writer.opened(), writer.accepted()])
        before = faults.count
        store.commit([writer.token()])
        faults.at = faults.count + (faults.count - before)  # a commit's last operation
        lost = writer.token()
        with pytest.raises(StoreFailed):
            store.commit([lost])
        assert [event.seq for event in store.read("s1", "ann", 0, 9)] == [1]
        store.commit([lost])
        store.close()
        again = open_store(path, IDENTITY)
        assert [event.seq for event in again.read("s1", "ann", 0, 9)] == [1, 2]
        again.close()

    def test_an_emptied_directory_is_another_store(self, path: Path) -> None:
        store, writer = open_store(path, IDENTITY), Writer()
        old = store.store_id
        store.commit([writer.opened(), *writer.turn(2)])
        shutil.rmtree(path)
        path.mkdir()
        with pytest.raises(StoreLost):
            store.commit(writer.turn(2))
        assert store.store_id != old
        assert store.list(None, None, 9) == []
        store.commit([Writer("s2").opened()])
        store.close()
        again = open_store(path, IDENTITY)
        assert [each.id for each in again.list(None, None, 9)] == ["s2"]
        assert again.store_id == store.store_id
        again.close()

    def test_deleted_directory_is_not_recreated(self, path: Path) -> None:
        store, writer = open_store(path, IDENTITY), Writer()
        store.commit([writer.opened(), *writer.turn(2)])
        away = path.with_name("away")
        path.rename(away)
        with pytest.raises(StoreError):
            store.commit(writer.turn(2))
        assert not path.exists()
        away.rename(path)
        assert store.load("s1", "ann").entries
        store.close()

    def test_pending_states_are_not_written_to_another_store(self, path: Path) -> None:
        store, writer = open_store(path, IDENTITY), Writer()
        store.commit([writer.opened(), *writer.turn(2), writer.saved()])
        shutil.rmtree(path)
        path.mkdir()
        store.maintain(0.0)
        assert state_files(path) == []
        store.close()

    def test_a_store_with_all_its_bytes_takes_deletions_alone(self, path: Path) -> None:
        store = open_store(path, IDENTITY, limits=StoreLimits(max_bytes=600_000))
        writer = Writer()
        store.commit([writer.opened()])
        while (path / "sessions.sqlite3").stat().st_size < 700_000:
            store.commit(writer.turn(1000))
            store.close()
            store = open_store(path, IDENTITY, limits=StoreLimits(max_bytes=600_000))
        with pytest.raises(StoreFull):
            store.maintain(1.0)
        with pytest.raises(StoreFull):
            store.commit(writer.turn(1))
        store.commit([writer.deleted()])
        store.maintain(100.0)
        store.commit([Writer("s2").opened()])
        store.close()


def test_a_log_with_a_gap_is_not_read_over(path: Path) -> None:
    store, writer = open_store(path, IDENTITY), Writer()
    store.commit([writer.opened(), *writer.turn(3)])
    store.commit(writer.turn(3))
    store.close()
    connection = apsw.Connection(str(path / "sessions.sqlite3"))
    connection.execute("DELETE FROM segment WHERE first = 0")
    connection.close()
    again = open_store(path, IDENTITY)
    with pytest.raises(SessionBroken):
        again.load("s1", "ann")
    with pytest.raises(SessionBroken):
        again.read("s1", "ann", 0, 9)
    again.close()
    assert list(problems(path)) != []


def test_a_database_without_tables_gets_them(path: Path) -> None:
    path.mkdir()
    connection = apsw.Connection(str(path / "sessions.sqlite3"))
    connection.pragma("journal_mode", "WAL")
    connection.close()
    store = open_store(path, IDENTITY)
    store.commit([Writer().opened()])
    store.close()


def test_states_are_written_a_few_at_a_time_and_the_rest_at_the_end(path: Path) -> None:
    """Thousands of sessions may be evicted at once; until they are written they are in memory."""
    with closing(open_store(path, IDENTITY)) as store:
        writers = [Writer(f"s{number}") for number in range(2 * SAVES_AT_ONCE + 1)]
        store.commit([writer.opened() for writer in writers])
        store.commit([r for w in writers for r in (*w.turn(1), w.saved(evicted=True))])
        found = []
        for now_s in (1.0, 1.1):
            has_more = store.maintain(now_s)
            left = len(store._unsaved.oldest(None))
            found.append((has_more, left, len(state_files(path))))
        assert found == [(True, SAVES_AT_ONCE + 1, SAVES_AT_ONCE), (True, 1, 2 * SAVES_AT_ONCE)]
    assert len(state_files(path)) == len(writers)
    with closing(open_store(path, IDENTITY)) as store:
        store.commit([writer.saved(evicted=True) for writer in writers[:3]])
        assert not store.maintain(1.0)
        assert store._connection is not None
        assert store._connection.log.heads == {}
