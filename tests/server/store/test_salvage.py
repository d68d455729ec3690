"""``everstream store salvage``: what can be read of real databases, cut off and overwritten."""

from __future__ import annotations

import shutil
from pathlib import Path

import apsw
import pytest

from server.errors import RequestError
from server.store.base import HistoryGone
from server.store.sqlite.database import DATABASE_FILE, signing_key
from server.store.sqlite.maintenance import problems
from server.store.sqlite.store import SqliteStore, open_store
from tests.server.cli.test_store import run
from tests.server.store.places import Place, to_format_1
from tests.server.store.records import IDENTITY, Writer, block, key_of, text_after

PAGE = 4096


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Writer]]:
    """A closed store of some hundred kilobytes, and what was written."""
    path = tmp_path_factory.mktemp("salvage") / "store"
    store = open_store(path, IDENTITY, "relaxed")
    writers = {f"s{i}": Writer(f"s{i}") for i in range(30)}
    for now_s, writer in enumerate(writers.values()):
        store.commit([writer.opened(block(2), (8, 9))])
        for turn in range(3):
            records = writer.turn(150, request_id=f"r{turn}", key=f"{writer.id}-{turn}")
            store.commit([*records, writer.saved()])
            store.maintain(float(now_s))
    store.close()
    assert (path / DATABASE_FILE).stat().st_size > 80 * PAGE
    return path, writers


@pytest.fixture
def path(made: tuple[Path, dict[str, Writer]], tmp_path: Path) -> Path:
    shutil.copytree(made[0], tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def writers(made: tuple[Path, dict[str, Writer]]) -> dict[str, Writer]:
    return made[1]


def check(store: SqliteStore, writers: dict[str, Writer]) -> tuple[int, int]:
    """How many sessions are whole and how many shorter; none has anything that was not written."""
    whole = shorter = 0
    for listed in store.list(None, None, 99):
        writer = writers[listed.id]
        loaded = store.load(listed.id, "ann")
        text = text_after(loaded.value.length, loaded.entries)
        assert len(text) == listed.length
        assert all(a in (None, b) for a, b in zip(text, writer.text, strict=False))
        whole += len(text) == len(writer.text)
        shorter += len(text) < len(writer.text)
        try:
            events = store.read(listed.id, "ann", 0, 9999)
            assert [event.seq for event in events] == [*range(1, listed.seq + 1)]
        except HistoryGone:
            assert len(text) <= len(writer.text)
        store.commit([Writer(f"{listed.id}-new").opened()])
    return whole, shorter


def salvaged(path: Path, code: int) -> tuple[SqliteStore, str]:
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    new = path.with_name("new")
    result = run("salvage", path, new)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert list(problems(new)) == []
    return open_store(new, IDENTITY), result.output


def test_a_whole_store_is_kept_as_a_whole(path: Path, writers: dict[str, Writer]) -> None:
    store, output = salvaged(path, 0)
    assert check(store, writers) == (30, 0)
    assert "30 sessions" in output
    assert signing_key(path.with_name("new")) == signing_key(path)
    found = key_of(store, "s3-1")
    assert found.finished is not None
    store.close()


def test_a_store_of_format_1_is_kept_as_a_whole(path: Path, writers: dict[str, Writer]) -> None:
    to_format_1(Place(path))
    store, _ = salvaged(path, 0)
    assert check(store, writers) == (30, 0)
    store.close()


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_database_that_was_cut_off(path: Path, writers: dict[str, Writer], share: float) -> None:
    size = (path / DATABASE_FILE).stat().st_size
    with (path / DATABASE_FILE).open("r+b") as file:
        file.truncate(int(size * share))
    assert run("check", path).exit_code == 1
    store, output = salvaged(path, 1)
    whole, shorter = check(store, writers)
    assert whole + shorter > 0
    assert output.count("session s") >= 1
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_pages_that_were_overwritten(path: Path, writers: dict[str, Writer], seed: int) -> None:
    size = (path / DATABASE_FILE).stat().st_size
    with (path / DATABASE_FILE).open("r+b") as file:
        for page in range(30 + seed, size // PAGE, 11):
            file.seek(page * PAGE)
            file.write(bytes([seed]) * PAGE)
    store, _ = salvaged(path, 1)
    whole, shorter = check(store, writers)
    assert whole + shorter > 0
    store.close()


def test_a_store_that_died_and_lost_a_part(path: Path) -> None:
    store = open_store(path, IDENTITY)
    one, two = Writer("one"), Writer("two")
    store.commit([one.opened(), two.opened()])
    store.commit([one.accepted(), two.accepted()])
    for _ in range(4):
        store.commit([one.token(), two.token()])
    dead = path.with_name("dead")
    shutil.copytree(path, dead)
    store.close()
    connection = apsw.Connection(str(dead / DATABASE_FILE))
    last = "(SELECT max(id) FROM journal)"
    ((data,),) = connection.execute(f"SELECT data FROM journal WHERE id = {last}")
    wrong = data.replace(str(two.text[-1]).encode(), b"999", 1)
    connection.execute(f"UPDATE journal SET data = ? WHERE id = {last}", (wrong,))
    connection.close()
    store, output = salvaged(dead, 1)
    assert ("session one" in output) != ("session two" in output)
    lengths = {each.id: each.length for each in store.list(None, None, 99)}
    assert sorted([lengths["one"] - len(one.text), lengths["two"] - len(two.text)]) == [-1, 0]
    for writer in (one, two):
        text = text_after(0, store.load(writer.id, "ann").entries)
        assert text == writer.text[: len(text)]
    store.close()


def test_broken_states_are_named_and_older_ones_serve(
    path: Path, writers: dict[str, Writer]
) -> None:
    connection = apsw.Connection(str(path / DATABASE_FILE))
    query = "SELECT file FROM snapshot ORDER BY key DESC LIMIT 1"
    ((file,),) = connection.execute(query)
    connection.close()
    (path / "snapshots" / file).write_bytes(b"")
    store, output = salvaged(path, 1)
    assert "a snapshot:" in output
    assert check(store, writers) == (30, 0)
    store.close()


def test_clients_of_the_old_store_get_a_reset(path: Path) -> None:
    old = open_store(path, IDENTITY)
    old.close()
    store, _ = salvaged(path, 0)
    assert store.store_id != old.store_id
    store.close()


@pytest.mark.parametrize("content", [b"", b"not a database" * 1000, bytes(9000)])
def test_what_is_no_database_is_an_error(path: Path, content: bytes) -> None:
    (path / DATABASE_FILE).write_bytes(content)
    result = run("salvage", path, path.with_name("new"))
    assert result.exit_code == 2
    assert "nothing can be read" in result.output
    assert not path.with_name("new").exists()


def test_store_in_use_is_refused(path: Path) -> None:
    store = open_store(path, IDENTITY)
    result = run("salvage", path, path.with_name("new"))
    store.close()
    assert result.exit_code == 2
    assert "has the store" in result.output


def test_the_new_folder_must_be_new(path: Path, tmp_path: Path) -> None:
    assert run("salvage", path, tmp_path).exit_code == 2
    assert run("salvage", tmp_path / "none", tmp_path / "new").exit_code == 2


def test_a_file_is_no_store(path: Path) -> None:
    with pytest.raises(RequestError, match="is a file"):
        open_store(path / DATABASE_FILE, IDENTITY)
    result = run("check", path / DATABASE_FILE)
    assert (result.exit_code, "is a file" in result.output) == (2, True)
