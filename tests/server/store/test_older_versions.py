"""What the first version has written is read: a store that it left in a crash, and an export.

``version_1.json`` was made by that version: the session ``done`` has two turns, of
which a rewind has taken back a part, ``runs`` is in the middle of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from server.engine.types import SamplingParams, TokenEvent
from server.store.portable import import_session
from server.store.sqlite.check import problems
from server.store.sqlite.migrations import MIGRATIONS
from server.store.sqlite.store import SqliteStore, open_store
from tests.server.store.records import IDENTITY, NOTE, Writer, block, key_of, noted, text_after

OLD: dict[str, Any] = json.loads((Path(__file__).parent / "version_1.json").read_text("utf-8"))
TEXTS = {
    "done": [1, 2, 102, 103, 104, 105, 106, 1, 2],
    "runs": [7, 8, 9, 103, 104, 105, 106, 107, 108],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The store, as it was left."""
    folder = tmp_path / "store"
    for name, data in OLD["files"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes.fromhex(data))
    connection = apsw.Connection(str(folder / "sessions.sqlite3"))
    connection.execute("\n".join(OLD["sql"]))
    connection.pragma("journal_mode", "WAL")
    assert connection.pragma("user_version") == 1
    connection.close()
    return folder


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    with closing(open_store(path, IDENTITY)) as made:
        yield made


@pytest.mark.parametrize("session", TEXTS)
@pytest.mark.parametrize("at", [None, 5, 0])
def test_sessions_are_as_they_were(store: SqliteStore, session: str, at: int | None) -> None:
    loaded = store.load(session, "ann", at)
    found = text_after(loaded.value.length, loaded.entries)
    wanted = TEXTS[session][:at]
    assert all(a in (None, b) for a, b in zip(found, wanted, strict=False))
    assert len(found) >= len(wanted)
    if loaded.value.state is not None:
        assert bytes(loaded.value.state.data) == bytes(block(loaded.value.position).data)
    assert loaded.value.constraint is None


def test_unfinished_request_keeps_its_parameters(store: SqliteStore) -> None:
    assert store.unfinished() == [("runs", "ann")]
    progress = store.load("runs", "ann").value.progress
    assert progress is not None
    assert progress.request.sampling == SamplingParams()
    events = store.read("runs", "ann", 0, 100)
    assert [event.token_id for event in events if isinstance(event, TokenEvent)] == (
        TEXTS["runs"][3:]
    )


def test_work_under_a_key_is_known(store: SqliteStore) -> None:
    found = key_of(store, "ann-1")
    assert found.finished is not None
    assert found.finished.usage.completion_tokens == 3
    assert found.note is None


def test_migrated_store_keeps_notes(store: SqliteStore) -> None:
    writer = Writer("new")
    store.commit([writer.opened(), noted(writer.accepted(key="k"))])
    found = key_of(store, "k")
    assert found.note == NOTE


def test_store_is_whole_and_of_this_version_afterwards(path: Path) -> None:
    open_store(path, IDENTITY).close()
    assert list(problems(path)) == []
    connection = apsw.Connection(str(path / "sessions.sqlite3"))
    assert connection.pragma("user_version") == len(MIGRATIONS)
    connection.close()


def test_a_format_that_migrates_is_no_problem(path: Path) -> None:
    before = (path / "sessions.sqlite3").read_bytes()
    assert list(problems(path)) == []
    assert (path / "sessions.sqlite3").read_bytes() == before
    (file,) = sorted(path.glob("snapshots/*/*"))[:1]
    file.write_bytes(b"")
    assert list(problems(path)) != []


def test_rows_get_checksums(path: Path) -> None:
    open_store(path, IDENTITY).close()
    connection = apsw.Connection(str(path / "sessions.sqlite3"))
    for table in ("session", "segment", "snapshot", "request_key"):
        query = f"SELECT count(*), count(sum) FROM {table}"
        ((count, num_sums),) = connection.execute(query)
        assert count == num_sums > 0, table
    connection.close()


def test_exported_session_can_be_imported() -> None:
    value = import_session(bytes.fromhex(OLD["export"]), IDENTITY, b"key")
    assert (value.position, value.pending, value.constraint) == (3, 6, None)
    assert value.recent == (1, 2, 3)
