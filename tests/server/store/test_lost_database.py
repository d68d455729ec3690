"""A database that is lost or replaced next to states: the store refuses, and deletes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from server.store.base import StoreFailed
from server.store.sqlite.database import DATABASE_FILE
from server.store.sqlite.store import open_store
from tests.server.store.records import IDENTITY, Writer, block

Loss = Callable[[Path], None]


def files_of(path: Path) -> dict[str, bytes]:
    """Everything but the lock, which every start writes."""
    found = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in found.items() if name != "lock"}


def missing(path: Path) -> None:
    (path / DATABASE_FILE).unlink()


def empty(path: Path) -> None:
    (path / DATABASE_FILE).write_bytes(b"")


def without_tables(path: Path) -> None:
    missing(path)
    connection = apsw.Connection(str(path / DATABASE_FILE))
    connection.pragma("journal_mode", "WAL")
    connection.close()


def of_another_store(path: Path) -> None:
    open_store(path.with_name("other"), IDENTITY).close()
    shutil.copy(path.with_name("other") / DATABASE_FILE, path / DATABASE_FILE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store with a state."""
    store = open_store(tmp_path / "store", IDENTITY)
    store.commit([Writer().opened(block(3), (1, 2, 3))])
    store.close()
    return tmp_path / "store"


@pytest.mark.parametrize("lose", [missing, empty, without_tables, of_another_store])
def test_states_of_a_lost_database_are_not_deleted(path: Path, lose: Loss) -> None:
    whole = (path / DATABASE_FILE).read_bytes()
    lose(path)
    before = [name for name in files_of(path) if name.startswith("snapshots")]
    for _ in range(2):
        with pytest.raises(StoreFailed, match="restore a backup"):
            open_store(path, IDENTITY)
    assert [name for name in files_of(path) if name.startswith("snapshots")] == before
    (path / DATABASE_FILE).write_bytes(whole)
    again = open_store(path, IDENTITY)
    assert again.load("s1", "ann").value.state is not None
    again.close()


@pytest.mark.parametrize("lose", [missing, empty])
def test_nothing_changes_where_there_is_no_database(path: Path, lose: Loss) -> None:
    lose(path)
    before = files_of(path)
    with pytest.raises(StoreFailed):
        open_store(path, IDENTITY)
    assert files_of(path) == before


@pytest.mark.parametrize("lose", [missing, empty])
def test_a_log_without_its_database_is_not_deleted(tmp_path: Path, lose: Loss) -> None:
    store = open_store(tmp_path / "store", IDENTITY)
    store.commit([Writer().opened()])
    shutil.copytree(tmp_path / "store", tmp_path / "dead")
    store.close()
    lose(tmp_path / "dead")
    log = tmp_path / "dead" / f"{DATABASE_FILE}-wal"
    before = log.read_bytes()
    with pytest.raises(StoreFailed, match="restore a backup"):
        open_store(tmp_path / "dead", IDENTITY)
    assert log.read_bytes() == before


def test_database_lost_while_the_store_is_open_is_not_recreated(path: Path) -> None:
    store, writer = open_store(path, IDENTITY), Writer("s2")
    states = sorted(path.glob("snapshots/*/*"))
    away = [file.rename(path.parent / file.name) for file in path.glob(f"{DATABASE_FILE}*")]
    for _ in range(2):
        with pytest.raises(StoreFailed, match="restore a backup"):
            store.commit([writer.opened()])
    assert sorted(path.glob("snapshots/*/*")) == states
    for file in away:
        file.rename(path / file.name)
    store.commit([writer.opened()])
    assert [each.id for each in store.list(None, None, 9)] == ["s1", "s2"]
    store.close()


def test_folder_without_states_gets_a_new_database(path: Path) -> None:
    first = open_store(path, IDENTITY)
    first.close()
    missing(path)
    shutil.rmtree(path / "snapshots")
    again = open_store(path, IDENTITY)
    assert again.store_id != first.store_id
    again.commit([Writer().opened(block(3), (1, 2, 3))])
    again.close()
    open_store(path, IDENTITY).close()


def test_a_store_from_before_the_folder_was_named_opens(path: Path) -> None:
    (path / "snapshots" / "store").unlink()
    again = open_store(path, IDENTITY)
    assert again.load("s1", "ann").value.state is not None
    again.close()
    assert (path / "snapshots" / "store").read_text() == again.store_id
