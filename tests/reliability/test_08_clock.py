"""(8) A clock that jumps a day either way: nothing expires early, no lease is stolen.

The store reads no wall clock at all, which is checked on its source, and counts
only differences of a clock that never runs back. Where that clock begins differs
from one process to the next.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import server.store
from server.store.base import StoreInUse
from server.store.sqlite.database import Waiting
from server.store.sqlite.store import SqliteStore, open_store
from server.store.table_store import StoreClock, StoreLimits
from tests.server.store.records import IDENTITY, Writer

DAY_S = 86_400.0
#: Which of a cache's files goes first may depend on dates: what is lost is computed again.
CACHES = ("prefix_files.py",)
FOLDER = Path(server.store.__file__).parent
SOURCES = sorted(path for path in FOLDER.glob("*.py") if path.name not in CACHES)

#: What tells the time of the day; `time.monotonic` is not among them.
WALL_CLOCKS = {"time", "time_ns", "now", "today", "utcnow", "localtime", "gmtime", "st_mtime"}


def opened(path: Path) -> SqliteStore:
    return open_store(path, IDENTITY, limits=StoreLimits(retention_s=3600.0))


def ids(store: SqliteStore) -> list[str]:
    return [each.id for each in store.list(None, None, 9)]


@pytest.mark.parametrize("jump_s", [-DAY_S, DAY_S])
def test_nothing_expires_where_the_clock_begins_elsewhere(tmp_path: Path, jump_s: float) -> None:
    writer = Writer()
    first = opened(tmp_path)
    first.maintain(2 * DAY_S)
    first.commit([writer.opened(), *writer.turn(2), writer.saved(evicted=True)])
    first.maintain(2 * DAY_S + 60)
    first.close()
    second = opened(tmp_path)
    for minute in range(50):
        second.maintain(2 * DAY_S + jump_s + 60 * minute)
    assert ids(second) == ["s1"]
    for minute in range(50, 70):
        second.maintain(2 * DAY_S + jump_s + 60 * minute)
    assert ids(second) == []
    second.close()


@pytest.mark.parametrize("jump_s", [-DAY_S, DAY_S])
def test_nothing_expires_by_the_dates_of_files(tmp_path: Path, jump_s: float) -> None:
    writer = Writer()
    first = opened(tmp_path)
    first.commit([writer.opened(), *writer.turn(2), writer.saved(evicted=True)])
    first.maintain(0.0)
    first.close()
    for path in tmp_path.rglob("*"):
        date_s = path.stat().st_mtime + jump_s
        os.utime(path, (date_s, date_s))
    second = opened(tmp_path)
    second.maintain(0.0)
    loaded = second.load("s1", "ann")
    assert (loaded.value.state is not None, loaded.entries) == (True, [])
    second.close()


def test_clock_does_not_run_backwards() -> None:
    clock = StoreClock()
    clock.set(100.0)
    for now_s in (5.0, 6.0, -DAY_S, -DAY_S + 1):
        clock.advance(now_s)
    assert clock.now_s == 102.0


@pytest.mark.parametrize("jump_s", [-DAY_S, DAY_S])
def test_no_lease_is_stolen_from_an_holder_whose_clock_differs(
    tmp_path: Path, jump_s: float
) -> None:
    holder = opened(tmp_path)
    beats = iter(range(10))

    def holder_beats(_: float) -> None:
        holder.maintain(jump_s + next(beats))

    with pytest.raises(StoreInUse, match=str(os.getpid())):
        open_store(tmp_path, IDENTITY, waiting=Waiting(10.0, lambda: 0.0, holder_beats))
    holder.commit([Writer().opened()])
    holder.close()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_wall_clock_is_read(path: Path) -> None:
    assert list(wall_clocks(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "from time import time",
        "from datetime import datetime\ndatetime.now()",
        "path.stat().st_mtime",
        "'strftime(now)'",
        "'... CURRENT_TIMESTAMP'",
    ],
)
def test_a_wall_clock_would_be_seen(source: str) -> None:
    assert list(wall_clocks(ast.parse(source))) != []


def wall_clocks(tree: ast.Module) -> Iterator[str]:
    """Names of what reads the time of the day, in Python or in SQL."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in WALL_CLOCKS:
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = ("current_timestamp", "current_date", "current_time", "strftime", "julianday")
            yield from (word for word in words if word in node.value.lower())
