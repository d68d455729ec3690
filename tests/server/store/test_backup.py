"""A copy of a store that another process writes to: whole, and of one moment."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from server.store.base import DiskFiles
from server.store.sqlite import maintenance as module
from server.store.sqlite.files import SNAPSHOTS_DIR
from server.store.sqlite.maintenance import back_up, problems, renew_id, stores_in, sync_tree
from server.store.sqlite.store import SqliteStore, open_store
from tests.server.store.records import IDENTITY, Writer, text_after


def check_copy(new: Path, writer: Writer, num_tokens: int) -> None:
    """It is whole, and its session has the text of ``writer`` up to that token."""
    assert list(problems(new)) == []
    copy = open_store(new, IDENTITY)
    loaded = copy.load(writer.id, "ann")
    length = loaded.value.length
    assert text_after(length, loaded.entries)[length:] == writer.text[length:num_tokens]
    copy.close()


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    return open_store(tmp_path / "store", IDENTITY)


def save_often(store: SqliteStore, writer: Writer, num_saves: int, now_s: float = 0.0) -> None:
    """Each time a snapshot is added, and an old one goes."""
    for number in range(num_saves):
        store.commit([*writer.tokens(3), writer.saved()])
        store.maintain(now_s + number)


def test_a_store_that_is_open_is_copied(store: SqliteStore, tmp_path: Path) -> None:
    writer = Writer()
    store.commit([writer.opened(), writer.accepted()])
    save_often(store, writer, 9)
    store.commit(writer.tokens(5))
    (tmp_path / "new").mkdir()
    copied = back_up(tmp_path / "store", tmp_path / "new")
    num_tokens = len(writer.text)
    save_often(store, writer, 9, 100.0)
    check_copy(tmp_path / "new", writer, num_tokens)
    assert copied.num_sessions == 1
    assert copied.num_states == len(list((tmp_path / "new" / SNAPSHOTS_DIR).glob("*/*")))
    store.close()


def test_states_that_go_before_they_are_copied_belong_to_another_moment(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that a moment's states are known, the server goes on and deletes some of them."""
    writer = Writer()
    store.commit([writer.opened(), writer.accepted()])
    save_often(store, writer, 12)
    seen: list[set[str]] = []
    states = module._states

    def states_of_before(source: apsw.Connection) -> set[str]:
        seen.append(states(source))
        if len(seen) < 4:
            save_often(store, writer, 9, 100.0 * len(seen))
        return seen[-1]

    monkeypatch.setattr(module, "_states", states_of_before)
    (tmp_path / "new").mkdir()
    assert back_up(tmp_path / "store", tmp_path / "new").lost == []
    assert len(seen) == 4
    check_copy(tmp_path / "new", writer, len(writer.text))
    store.close()


def test_what_is_written_while_the_database_is_copied_is_not_in_the_copy(
    store: SqliteStore, tmp_path: Path
) -> None:
    """The copy neither begins again nor mixes two moments."""
    writer = Writer()
    store.commit([writer.opened(), writer.accepted()])
    save_often(store, writer, 9)
    num_tokens, num_steps = len(writer.text), 0

    def write_more(line: str) -> None:
        nonlocal num_steps
        if "pages" in line:
            num_steps += 1
            save_often(store, writer, 2, 100.0 * num_steps)

    (tmp_path / "new").mkdir()
    back_up(tmp_path / "store", tmp_path / "new", write_more, pages_at_once=1)
    database = apsw.Connection(str(tmp_path / "new" / "sessions.sqlite3"))
    assert num_steps == database.pragma("page_count")
    database.close()
    check_copy(tmp_path / "new", writer, num_tokens)
    store.close()


def test_a_state_that_the_store_has_lost_is_told(store: SqliteStore, tmp_path: Path) -> None:
    writer = Writer()
    store.commit([writer.opened(), *writer.turn(3), writer.saved()])
    store.maintain(0.0)
    (file,) = (tmp_path / "store" / SNAPSHOTS_DIR).glob("*/*")
    file.unlink()
    (tmp_path / "new").mkdir()
    copied = back_up(tmp_path / "store", tmp_path / "new")
    assert copied.lost == [f"{file.parent.name}/{file.name}"]
    assert copied.num_states == 0
    store.close()


class Noted(DiskFiles):
    """Notes what is synced."""

    def __init__(self) -> None:
        self.seen: list[Path] = []

    def sync(self, path: Path) -> None:
        self.seen.append(path)

    sync_dir = sync


def test_every_file_of_a_copy_is_synced(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    files = Noted()
    sync_tree(tmp_path / "a", files)
    assert files.seen == [tmp_path / "a" / "b" / "file", tmp_path / "a" / "b", tmp_path / "a"]


def test_stores_of_all_models_and_versions_are_found(tmp_path: Path) -> None:
    places = ["", "versions/1", "models/one", "models/one/versions/2", "snapshots/3"]
    for place in places:
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "sessions.sqlite3").touch()
    found = [str(folder.relative_to(tmp_path)) for folder in stores_in(tmp_path)]
    assert found == [".", "models/one", "models/one/versions/2", "versions/1"]


def test_a_new_id_makes_another_store_of_the_same_sessions(
    store: SqliteStore, tmp_path: Path
) -> None:
    writer, path = Writer(), tmp_path / "store"
    store.commit([writer.opened(), *writer.turn(3), writer.saved()])
    store.close()
    store_id = renew_id(path)
    assert store_id != store.store_id
    check_copy(path, writer, len(writer.text))
    again = open_store(path, IDENTITY)
    assert again.store_id == store_id
    again.close()


def test_a_new_id_that_was_interrupted_leaves_the_store_as_it_was(
    store: SqliteStore, tmp_path: Path
) -> None:
    """The file that names the owner of the states goes first."""
    writer, path = Writer(), tmp_path / "store"
    store.commit([writer.opened(), *writer.turn(3), writer.saved()])
    store.close()
    (path / SNAPSHOTS_DIR / "store").unlink()
    check_copy(path, writer, len(writer.text))
