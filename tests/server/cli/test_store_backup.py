"""``everstream store backup`` and ``new-id``, as they are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from server.cli.store import backup_command, new_id_command
from server.store.sqlite.maintenance import problems
from server.store.sqlite.store import open_store
from tests.server.store.records import IDENTITY, Writer, block, file_digest, named_file

app = typer.Typer()
app.command("backup")(backup_command)
app.command("new-id")(new_id_command)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def make_store(path: Path) -> None:
    store, writer = open_store(path, IDENTITY), Writer("one")
    store.commit([writer.opened(block(3), (1, 2, 3)), *writer.turn(3)])
    store.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The stores of two models."""
    for place in ("store", "store/models/other"):
        make_store(tmp_path / place)
    return tmp_path / "store"


def test_stores_of_all_models_are_copied(path: Path, tmp_path: Path) -> None:
    new = tmp_path / "to" / "new"
    result = run("backup", path, new)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == f"{path}: 1 sessions, 1 states"
    assert lines[1] == f"{path / 'models/other'}: 1 sessions, 1 states"
    assert lines[2].endswith(f"bytes; start a server with --store {new}")
    for store in (new, new / "models" / "other"):
        assert list(problems(store)) == []
        assert (store / "signing.key").read_bytes()
    assert {file.stat().st_mode & 0o077 for file in [new, *new.rglob("*.*")]} == {0}
    assert [file.name for file in new.parent.iterdir()] == ["new"]


def test_named_states_are_copied(path: Path, tmp_path: Path) -> None:
    store = open_store(path, IDENTITY)
    store.put_named("formal", file_digest(1), named_file(1))
    store.close()
    assert run("backup", path, tmp_path / "new").exit_code == 0
    copy = open_store(tmp_path / "new", IDENTITY)
    assert copy.named_states() == {"formal": file_digest(1)}
    copy.close()


@pytest.mark.parametrize("link", ["signing.key", "sessions.sqlite3", "named", "snapshots"])
def test_a_link_in_a_store_is_not_followed(link: str, path: Path, tmp_path: Path) -> None:
    store = open_store(path, IDENTITY)
    store.put_named("formal", file_digest(1), named_file(1))
    store.close()
    (path / link).rename(tmp_path / "elsewhere")
    (path / link).symlink_to(tmp_path / "elsewhere")
    result = run("backup", path, tmp_path / "new")
    assert result.exit_code == 2, result.output
    assert f"It leads out of the store, which is not copied: '{path / link}'" in result.output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("new", "words"), [("store", "exists"), ("store/new", "inside of"), ("file/new", "cannot be")]
)
def test_a_place_that_cannot_be_used_is_refused(
    new: str, words: str, path: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    result = run("backup", path, tmp_path / new)
    assert (result.exit_code, words in result.output) == (2, True), result.output
    assert sorted(tmp_path.rglob("*")) == before


def test_a_copy_that_fails_leaves_nothing(path: Path, tmp_path: Path) -> None:
    (path / "models" / "other" / "sessions.sqlite3").write_bytes(b"not a database" * 100)
    result = run("backup", path, tmp_path / "new")
    assert result.exit_code == 2
    assert "file is not a database" in result.output
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


def test_a_missing_state_is_told(path: Path, tmp_path: Path) -> None:
    (file,) = (path / "snapshots").glob("*/*")
    file.unlink()
    result = run("backup", path, tmp_path / "new")
    assert result.exit_code == 1
    assert f"{path}: the state {file.parent.name}/{file.name} is missing" in result.output
    assert (tmp_path / "new").is_dir()


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    for command in (["backup", tmp_path, tmp_path / "new"], ["new-id", tmp_path]):
        result = run(*command)
        assert (result.exit_code, "has no store" in result.output) == (2, True)


def test_a_new_id_is_refused_while_a_server_runs(path: Path) -> None:
    store = open_store(path / "models" / "other", IDENTITY)
    result = run("new-id", path)
    assert result.exit_code == 2
    assert "stop it first" in result.output
    store.close()
    result = run("new-id", path)
    assert result.exit_code == 0
    again = open_store(path / "models" / "other", IDENTITY)
    assert f"other: {again.store_id}" in result.output
    assert again.store_id != store.store_id
    again.close()
