"""The files of a store are readable by their owner alone, whatever their folder allows."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from server.store.sqlite.database import DATABASE_FILE
from server.store.sqlite.store import open_store
from tests.server.store.records import IDENTITY, Writer, block


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    """A folder that everybody may read, with a store that is open."""
    path = tmp_path / "shown"
    path.mkdir()
    path.chmod(0o755)
    return path


def test_files_are_private_in_any_folder(shown: Path) -> None:
    mask = os.umask(0)
    try:
        store = open_store(shown, IDENTITY)
        store.commit([Writer().opened(block(3), (1, 2, 3))])
        rights = {file: file.stat().st_mode & 0o077 for file in shown.rglob("*")}
        store.close()
    finally:
        os.umask(mask)
    assert len(rights) >= 6
    assert set(rights.values()) == {0}


def test_others_cannot_read_a_new_folder(tmp_path: Path) -> None:
    open_store(tmp_path / "store", IDENTITY).close()
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0


def test_an_older_database_is_made_private(shown: Path) -> None:
    store = open_store(shown, IDENTITY)
    store.commit([Writer().opened()])
    for file in shown.glob(f"{DATABASE_FILE}*"):
        file.chmod(0o644)
    shutil.copytree(shown, shown.with_name("dead"))
    store.close()
    again = open_store(shown.with_name("dead"), IDENTITY)
    rights = [file.stat().st_mode & 0o777 for file in (shown.with_name("dead")).glob("*sql*")]
    again.close()
    assert set(rights) == {0o600}
