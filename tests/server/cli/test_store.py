"""``everstream store``, as its commands are called."""

from __future__ import annotations

import shutil
from pathlib import Path

import apsw
import pytest
import typer
from typer.testing import CliRunner, Result

from server.cli.store import check_command, compact_command, export_command
from server.store.sqlite.database import DATABASE_FILE, signing_key
from server.store.sqlite.store import open_store
from server.store.states import import_session
from tests.server.store.records import IDENTITY, Writer, block

app = typer.Typer()
app.command("check")(check_command)
app.command("compact")(compact_command)
app.command("export")(export_command)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with two sessions, one of which was saved at its end."""
    store = open_store(tmp_path / "store", IDENTITY)
    one, two = Writer("one"), Writer("two")
    store.commit([one.opened(), *one.turn(3), one.saved(evicted=True)])
    store.commit([two.opened(block(3), (1, 2, 3)), *two.turn(3)])
    store.close()
    return tmp_path / "store"


def set_format(path: Path, version: int) -> None:
    connection = apsw.Connection(str(path / DATABASE_FILE))
    connection.pragma("user_version", version)
    connection.close()


class TestCheck:
    def test_a_whole_store_passes(self, path: Path) -> None:
        result = run("check", path)
        assert (result.exit_code, "whole" in result.output) == (0, True)

    def test_a_store_in_use_passes(self, path: Path) -> None:
        store, writer = open_store(path, IDENTITY), Writer("three")
        store.commit([writer.opened(), writer.accepted(), *writer.tokens(5)])
        assert run("check", path).exit_code == 0
        store.close()

    def test_a_store_that_died_passes(self, path: Path, tmp_path: Path) -> None:
        store, writer = open_store(path, IDENTITY), Writer("three")
        store.commit([writer.opened(), writer.accepted(), *writer.tokens(5)])
        shutil.copytree(path, tmp_path / "dead")
        assert run("check", tmp_path / "dead").exit_code == 0
        store.close()

    def test_a_folder_of_several_stores_names_them(self, path: Path, tmp_path: Path) -> None:
        (tmp_path / "models").mkdir()
        inside = shutil.move(path, tmp_path / "models" / "small")
        result = run("check", tmp_path)
        assert result.exit_code == 2
        assert f"name one of the stores in it: {inside}" in result.output

    def test_what_is_left_of_a_session_that_is_gone_is_counted(self, path: Path) -> None:
        database = apsw.Connection(str(path / DATABASE_FILE))
        database.execute("PRAGMA foreign_keys = OFF")
        database.execute("DELETE FROM session WHERE id = 'two'")
        database.close()
        result = run("check", path)
        assert result.exit_code == 1
        assert "rows of snapshot belong to no session" in result.output

    def test_every_broken_state_is_named(self, path: Path) -> None:
        for file in path.glob("snapshots/*/*"):
            file.write_bytes(file.read_bytes()[:-1] + b"\0")
        result = run("check", path)
        assert result.exit_code == 1
        assert "session one" in result.output
        assert "session two" in result.output
        assert "2 problems" in result.output

    def test_a_gap_in_a_log_is_found(self, path: Path) -> None:
        import apsw

        connection = apsw.Connection(str(path / "sessions.sqlite3"))
        connection.execute("UPDATE session SET num_entries = num_entries + 1 WHERE id = 'one'")
        connection.execute("UPDATE session SET seq = seq + 1 WHERE id = 'two'")
        connection.close()
        result = run("check", path)
        assert result.exit_code == 1
        assert "session one: its log has 5 of 6 entries" in result.output
        assert "session two: its log ends at event 4 of 5" in result.output

    def test_a_broken_database_is_a_problem(self, path: Path) -> None:
        (path / "sessions.sqlite3").write_bytes(b"not a database" * 100)
        assert run("check", path).exit_code == 1

    def test_a_broken_signing_key_is_found(self, path: Path) -> None:
        (path / "signing.key").write_bytes(b"short")
        result = run("check", path)
        assert (result.exit_code, "signing.key is not a key" in result.output) == (1, True)

    @pytest.mark.parametrize("version", [0, 99])
    def test_another_format_is_found(self, path: Path, version: int) -> None:
        set_format(path, version)
        result = run("check", path)
        assert result.exit_code == 1
        assert f"the store has format {version}" in result.output
        assert "1 problem" in result.output

    def test_no_store_is_an_error(self, tmp_path: Path) -> None:
        assert run("check", tmp_path).exit_code == 2


class TestCompact:
    def test_frees_disk_space_and_keeps_the_sessions(self, path: Path) -> None:
        store = open_store(path, IDENTITY)
        writers = [Writer(f"s{i}") for i in range(40)]
        for writer in writers:
            store.commit([writer.opened(), *writer.turn(400)])
        for writer in writers:
            store.commit([writer.deleted()])
        store.close()
        before = (path / "sessions.sqlite3").stat().st_size
        assert run("compact", path).exit_code == 0
        assert (path / "sessions.sqlite3").stat().st_size < before / 2
        assert run("check", path).exit_code == 0
        again = open_store(path, IDENTITY)
        assert [each.id for each in again.list(None, None, 9)] == ["one", "two"]
        assert again.load("two", "ann").value.state is not None
        again.close()

    def test_deletes_what_is_beyond_retention(self, path: Path) -> None:
        store = open_store(path, IDENTITY)
        store.maintain(0.0)
        store.maintain(100.0)
        store.load("two", "ann")
        store.maintain(101.0)
        store.close()
        assert run("compact", path, "--retention", 50).exit_code == 0
        again = open_store(path, IDENTITY)
        assert [each.id for each in again.list(None, None, 9)] == ["two"]
        again.close()


class TestExport:
    def test_writes_a_file_that_can_be_imported(self, path: Path, tmp_path: Path) -> None:
        result = run("export", path, "one", tmp_path / "file")
        assert result.exit_code == 0, result.output
        data = (tmp_path / "file").read_bytes()
        value = import_session(data, IDENTITY, signing_key(path))
        assert (value.id, value.length) == ("one", 5)
        assert value.state is not None

    @pytest.mark.parametrize("is_there", [False, True])
    def test_the_file_is_its_owners_alone(self, path: Path, tmp_path: Path, is_there: bool) -> None:
        if is_there:
            (tmp_path / "file").touch(0o644)
        assert run("export", path, "one", tmp_path / "file").exit_code == 0
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600

    def test_a_session_that_has_gone_on_needs_its_model(self, path: Path, tmp_path: Path) -> None:
        result = run("export", path, "two", tmp_path / "file")
        assert result.exit_code == 2
        assert "--model FOLDER (bundled: everstream-stories" in result.output
        result = run("export", path, "two", tmp_path / "file", "--model", "everstream-stories")
        assert result.exit_code == 0, result.output
        data = (tmp_path / "file").read_bytes()
        value = import_session(data, IDENTITY, signing_key(path))
        assert (value.position, value.length) == (3, 8)

    def test_an_unknown_session_is_an_error(self, path: Path, tmp_path: Path) -> None:
        assert run("export", path, "three", tmp_path / "file").exit_code == 2
