"""(39) Any byte of any row altered, a row missing or at another place: never another history.

What is read is as it was written, or an error of the one session that the row belongs to.
The store opens, and the other sessions continue.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import pytest

from server.engine.session import Accepted
from server.errors import RequestError
from server.store.base import Events, Keyed, Numbered, SessionBroken, SnapshotBroken, Store
from server.store.codec import decode_value
from server.store.sqlite.database import DATABASE_FILE
from server.store.sqlite.maintenance import problems
from server.store.sqlite.store import open_store
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.streams import client_of, kept_streams, run_all, tiny_server
from tests.server.store.records import IDENTITY, Writer, block, text_after

SESSIONS = ("one", "two", "copy")
#: The columns that lead to what a client is told; of numbers, these bits are altered.
TABLES = {
    "journal": ("data", "keys"),
    "segment": ("session", "first", '"end"', "last_seq", "running", "data", "sum"),
    "session": (
        *("id", "owner", "epoch", "length", "seq", "running", "num_entries", "log_seq"),
        *("journal", "sum"),
    ),
    "snapshot": ("session", "place", "min_length", "identity", "value", "file", "sum"),
    "identity": ("fields",),
    "request_key": (
        *("owner", "key", "session", "session_id", "request_id", "first_seq", "length"),
        *("is_append", "finished", "note", "sum", "note_sum"),
    ),
}
CODES = (None, "session_broken", "snapshot_broken", "session_not_found", "history_gone")
BITS = (1, 1 << 3, 1 << 20)
STRIDE = 23


class Known(NamedTuple):
    """What an unaltered store says."""

    texts: dict[str, list[int]]
    events: dict[str, Events]
    logs: dict[str, Numbered]
    keys: dict[str, Keyed | None]
    values: set[str]


def noted(record: tuple[str, Any], note: str) -> tuple[str, Accepted]:
    id, entry = record
    return id, entry._replace(request=replace(entry.request, note=note))


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as a crash leaves it: every table has rows, the journal many of several sessions."""
    path = tmp_path_factory.mktemp("flipped")
    store = open_store(path / "live", IDENTITY, "relaxed")
    one, two = Writer("one"), Writer("two")
    copy = Writer("copy")
    store.commit([one.opened(), two.opened()])
    store.commit([*one.turn(3, key="k1"), *two.turn(2)])
    store.commit([one.saved(), two.saved(), copy.opened(block(5), tuple(one.text))])
    store.maintain(1.0)
    store.commit([noted(two.accepted(key="k2"), "note"), two.token(), two.finished()])
    store.commit([one.accepted(request_id="r2"), copy.accepted()])
    for _ in range(3):
        store.commit([one.token(), one.token(), copy.token()])
    store.commit([two.accepted(request_id="r3")])
    store.commit([two.token("é"), one.token(), copy.token()])
    shutil.copytree(path / "live", path / "dead")
    store.close()
    with apsw.Connection(str(path / "dead" / DATABASE_FILE)) as connection:
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    return path / "dead"


@pytest.fixture(scope="module")
def known(dead: Path) -> Known:
    with copied(dead) as store:
        loaded = {id: store.load(id, "ann") for id in SESSIONS}
        texts = {id: text_after(each.value.length, each.entries) for id, each in loaded.items()}
        events = {id: store.read(id, "ann", 0, 99) for id in SESSIONS[:2]}
        events["copy"] = store.read("copy", "ann", loaded["copy"].value.seq, 99)
        keys = {key: store.find_key("ann", key) for key in ("k1", "k2")}
        logs = {id: store.entries(id, "ann", 0, 99) for id in SESSIONS}
    rows = connected(dead, lambda execute: [*execute("SELECT value FROM snapshot")])
    return Known(texts, events, logs, keys, {repr(decode_value(value)) for (value,) in rows})  # type: ignore[arg-type]


class copied:  # noqa: N801 - a context
    """The store of a copy of ``path``, while the block runs."""

    def __init__(self, path: Path, alter: Callable[[Any], object] = lambda _: None) -> None:
        self.path = path.with_name("copy")
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(path, self.path)
        connected(self.path, alter)

    def __enter__(self) -> Store:
        self._store = open_store(self.path, IDENTITY, "relaxed")
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.close()


def connected(path: Path, alter: Callable[[Any], Any]) -> Any:
    connection = apsw.Connection(str(path / DATABASE_FILE))
    try:
        return alter(connection.execute)
    finally:
        connection.close()


def altered(value: Any, long: bool) -> Iterator[Any]:
    """``value`` with a byte or a bit altered, at many places."""
    if isinstance(value, int):
        yield from (value ^ bit for bit in BITS)
    elif value is not None:
        data = value.encode() if isinstance(value, str) else value
        for place in range(0, len(data), 1 if long else STRIDE):
            for flip in (1, 0x04):
                broken = bytearray(data)
                broken[place] ^= flip
                text = bytes(broken)
                yield text.decode(errors="replace") if isinstance(value, str) else text


def check(store: Store, known: Known) -> set[str]:
    """The sessions that are refused; all others must be as they were."""
    refused: set[str] = set()
    for id in SESSIONS:
        for ask in (check_text, check_events, check_log):
            code = code_of(ask, store, known, id)
            assert code in CODES, id
            if code is not None:
                refused.add(id)
    for key, wanted in known.keys.items():
        try:
            assert store.find_key("ann", key) in (wanted, None)
        except SessionBroken:
            refused.add(f"key {key}")
    writer = Writer("new")
    store.commit([writer.opened(), *writer.turn(2)])
    store.maintain(2.0)
    assert store.load("new", "ann").entries == writer.entries
    return refused


def code_of(ask: Callable[[Store, Known, str], None], *arguments: Any) -> str | None:
    """How a session is refused, if it is."""
    try:
        ask(*arguments)
    except RequestError as error:
        return error.code
    return None


def check_text(store: Store, known: Known, id: str) -> None:
    loaded = store.load(id, "ann")
    assert repr(replace(loaded.value, state=None)) in known.values
    text = text_after(loaded.value.length, loaded.entries)
    wanted = known.texts[id]
    assert len(text) == len(wanted), id
    assert all(a == b for a, b in zip(text, wanted, strict=True) if None not in (a, b)), id


def check_events(store: Store, known: Known, id: str) -> None:
    wanted = known.events[id]
    assert store.read(id, "ann", wanted[0].seq - 1, 99) == wanted


def check_log(store: Store, known: Known, id: str) -> None:
    assert repr(store.entries(id, "ann", 0, 99)) == repr(known.logs[id])


def alterations(dead: Path, table: str, long: bool) -> Iterator[tuple[str, int, Any]]:
    for column in TABLES[table]:
        query = f"SELECT rowid, {column} FROM {table}"
        if table == "request_key":
            query = f"SELECT owner || key, {column} FROM {table}"
        for row, value in connected(dead, lambda execute, q=query: [*execute(q)]):
            for other in altered(value, long):
                yield column, row, other


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("table", TABLES)
def test_an_altered_row_costs_its_session_at_most(
    dead: Path, known: Known, table: str, long: bool
) -> None:
    row_id = "owner || key" if table == "request_key" else "rowid"
    num_refused = 0
    for column, row, value in alterations(dead, table, long):
        query = f"UPDATE {table} SET {column} = ? WHERE {row_id} = ?"

        def alter(execute: Any, query: str = query, values: Any = (value, row)) -> None:
            try:
                execute(query, values)
            except apsw.ConstraintError:  # not a row that the database would have
                return

        opened = copied(dead, alter)
        found = list(problems(opened.path))
        with opened as store:
            refused = check(store, known)
        # A row that names another session is missing to one, and in the way of the other.
        assert len(refused) <= (2 if column == "session" else 1), (column, row, value, refused)
        assert found or not refused, (column, row, value)
        num_refused += len(refused)
    assert num_refused > 0 or table == "identity"


@pytest.mark.parametrize("table", ["journal", "segment", "snapshot"])
def test_missing_rows_are_noticed(dead: Path, known: Known, table: str) -> None:
    num_refused = 0
    for (row,) in connected(dead, lambda execute: [*execute(f"SELECT rowid FROM {table}")]):
        query = f"DELETE FROM {table} WHERE rowid = ?"
        with copied(dead, lambda execute, q=query, r=row: execute(q, (r,))) as store:
            try:
                num_refused += len(check(store, known))
            except AssertionError:
                last = connected(dead, lambda execute: [*execute("SELECT max(id) FROM journal")])
                assert table == "journal"
                assert row in (last[0][0], 1), row
    assert num_refused > 0


@pytest.mark.parametrize(
    ("table", "column"), [("journal", "data"), ("segment", "data"), ("snapshot", "value")]
)
def test_exchanged_rows_are_noticed(dead: Path, known: Known, table: str, column: str) -> None:
    rows = connected(dead, lambda execute: [*execute(f"SELECT rowid, {column} FROM {table}")])
    query = f"UPDATE {table} SET {column} = ? WHERE rowid = ?"
    num_refused = 0
    for (row, value), (other, other_value) in pairwise(rows):

        def exchange(execute: Any, pairs: Any = ((value, other), (other_value, row))) -> None:
            for pair in pairs:
                execute(query, pair)

        with copied(dead, exchange) as store:
            num_refused += len(check(store, known))
    assert num_refused > 0


def test_a_session_in_quarantine_stays_there_and_can_be_deleted(dead: Path, known: Known) -> None:
    def alter(execute: Any) -> None:
        last = "(SELECT max(id) FROM journal)"
        ((data,),) = execute(f"SELECT data FROM journal WHERE id = {last}")
        token = str(known.texts["two"][-1]).encode()
        assert token in data
        execute(f"UPDATE journal SET data = ? WHERE id = {last}", (data.replace(token, b"999"),))

    opened = copied(dead, alter)
    with opened as store:
        assert check(store, known) == {"two"}
    again = open_store(opened.path, IDENTITY)
    with pytest.raises(SessionBroken):
        again.load("two", "ann")
    assert again.unfinished() == [("copy", "ann"), ("one", "ann")]
    again.commit([Writer("two").deleted()])
    assert "two" not in {each.id for each in again.list(None, None, 9)}
    again.close()
    assert list(problems(opened.path)) == []


def test_a_broken_row_of_the_only_snapshot_is_refused(dead: Path) -> None:
    def alter(execute: Any) -> None:
        execute("UPDATE snapshot SET place = place + 1")

    with copied(dead, alter) as store:
        for id in SESSIONS:
            with pytest.raises(SnapshotBroken):
                store.load(id, "ann")


async def test_a_server_refuses_the_altered_session_alone(tmp_path: Path) -> None:
    """A token in the log of a server that was killed: neither it nor another one is sent."""
    path, odometer = tmp_path / "store", Odometer()
    streams = kept_streams(3, History(), odometer, max_tokens=10**6)
    with tiny_server(tmp_path) as server:
        running = asyncio.create_task(run_all(streams, server.stream_url))
        await odometer.reach(60)
        server.kill()
        await running
        altered = connected(path, alter_a_token)
        assert any(altered in problem for problem in problems(path))
        await asyncio.to_thread(server.start)
        async with client_of(server.url) as client:
            for stream in streams:
                path_of = f"/v1/sessions/{stream.session}"
                cancelled = await client.post(f"{path_of}/cancel")
                events = await client.get(f"{path_of}/events", params={"starting_after": 0})
                if stream.session == altered:
                    assert events.status_code == 410, events.text
                    assert events.json()["error"]["code"] == "session_broken"
                else:
                    assert cancelled.status_code == 200, cancelled.text
                    assert events.status_code == 200, events.text
            deleted = await client.delete(f"/v1/sessions/{altered}")
            assert deleted.status_code == 200, deleted.text
        assert server.get("/ready")[0] == 200
        assert server.stop() == 0


def alter_a_token(execute: Any) -> str:
    """Another digit in the last token that only the journal has; the id of its session."""
    query = "SELECT key, id, journal FROM session"
    heads = {key: (id, stored) for key, id, stored in execute(query)}
    for number, data in [*execute("SELECT id, data FROM journal ORDER BY id DESC")]:
        for line in reversed(data[1:-1].split(b",\n")):
            key, entry = json.loads(line)[:2]
            id, stored = heads[key]
            if number <= stored or len(entry) == 2:  # in a segment already, or no token
                continue
            start = data.index(line)
            place = data.rindex(b",%d," % entry[2], start, start + len(line)) + 1
            other = b"2" if data[place : place + 1] != b"2" else b"3"
            broken = data[:place] + other + data[place + 1 :]
            execute("UPDATE journal SET data = ? WHERE id = ?", (broken, number))
            return str(id)
    raise AssertionError("the journal has no token of its own")
