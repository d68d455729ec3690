"""(4) The write-ahead log cut off at any byte: the store opens, and loses the last commits alone.

No commit is there in part, and none that came before a lost one is lost.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import apsw
import pytest

from server.engine.session import Entry
from server.store.base import Store
from server.store.sqlite.maintenance import problems
from server.store.sqlite.store import open_store
from tests.server.store.records import IDENTITY, Writer

WAL = "sessions.sqlite3-wal"
WAL_HEADER_BYTES = 32
FRAME_BYTES = 4096 + 24
STRIDE = 4999


def crashed_store(path: Path) -> list[list[Entry]]:
    """What a process leaves that dies after a few commits; the log after each of them."""
    writer = Writer()
    store = open_store(path / "live", IDENTITY)
    store.commit([writer.opened()])
    store.maintain(0.0)
    after: list[list[Entry]] = [[]]
    for record in [record for _ in range(2) for record in writer.turn(1)]:
        store.commit([record])
        after.append([*after[-1], record[1]])
    shutil.copytree(path / "live", path / "dead")
    store.close()
    return after


def log_of(store: Store) -> list[Entry] | None:
    """The session's entries; None where it is not there yet."""
    return store.load("s1", "ann").entries if store.list(None, None, 1) else None


@pytest.mark.timeout(3600)
def test_a_log_cut_anywhere_loses_its_end_alone(tmp_path: Path, long: bool) -> None:
    after = crashed_store(tmp_path)
    size = (tmp_path / "dead" / WAL).stat().st_size
    borders = range(WAL_HEADER_BYTES, size + 1, FRAME_BYTES)
    assert len(borders) > 10
    near = {border + offset for border in borders for offset in (-1, 0)}
    places = range(size + 1) if long else sorted({*near, *range(0, size, STRIDE)})
    known: list[Entry] = []
    for place in places:
        path = tmp_path / "cut"
        shutil.copytree(tmp_path / "dead", path)
        with (path / WAL).open("r+b") as file:
            file.truncate(place)
        store = open_store(path, IDENTITY, "relaxed")
        log = log_of(store)
        store.close()
        assert list(problems(path)) == []
        assert log is None or log in after
        assert log is None or len(log) >= len(known), place
        known = log or known
        shutil.rmtree(path)
    assert known == after[-1]


def test_what_sqlite_has_checkpointed_needs_no_log(tmp_path: Path) -> None:
    after = crashed_store(tmp_path)
    connection = apsw.Connection(str(tmp_path / "dead" / "sessions.sqlite3"))
    connection.execute("SELECT count(*) FROM journal")
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    connection.close()
    (tmp_path / "dead" / WAL).unlink(missing_ok=True)
    store = open_store(tmp_path / "dead", IDENTITY)
    assert log_of(store) == after[-1]
    store.close()
