"""Room that a store keeps on the disk for deletions and for its next start."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from server.store.base import StoreFull
from server.store.sqlite.database import RESERVE_FILE, Reserve
from server.store.sqlite.store import open_store
from tests.server.store.faults import Faults, FaultyFiles, FaultyVfs
from tests.server.store.records import IDENTITY, Writer


def test_a_store_has_a_reserve_that_takes_up_room(tmp_path: Path) -> None:
    store = open_store(tmp_path, IDENTITY)
    blocks = (tmp_path / RESERVE_FILE).stat().st_blocks
    store.close()
    assert blocks * 512 >= (tmp_path / RESERVE_FILE).stat().st_size > 0


def test_deletions_alone_have_the_reserve_s_room(tmp_path: Path) -> None:
    """A disk that is full until something is deleted from it."""
    faults = Faults(code=errno.ENOSPC)
    files, vfs = FaultyFiles(faults), FaultyVfs(faults)
    store = open_store(tmp_path, IDENTITY, "relaxed", files=files, vfs=vfs.name)
    one, two = Writer("one"), Writer("two")
    store.commit([one.opened(), two.opened()])
    faults.lasting, faults.at = True, faults.count + 1
    files.on_unlink = faults.heal
    with pytest.raises(StoreFull):
        store.commit([one.accepted()])
    store.commit([one.deleted()])
    assert [each.id for each in store.list(None, None, 9)] == ["two"]
    store.close()


def test_reserve_is_restored_when_there_is_room(tmp_path: Path) -> None:
    files = FaultyFiles(Faults(code=errno.ENOSPC))
    reserve = Reserve(tmp_path, files)
    reserve.restore()
    size = (tmp_path / RESERVE_FILE).stat().st_size
    assert reserve.give_up()
    assert not (tmp_path / RESERVE_FILE).exists()
    files.faults.at, files.faults.lasting = 1, True
    with pytest.raises(StoreFull):
        reserve.check()
    assert not (tmp_path / RESERVE_FILE).exists()
    files.faults.heal()
    reserve.check()
    assert (tmp_path / RESERVE_FILE).stat().st_size == size


def test_missing_reserve_cannot_be_released(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path, FaultyFiles(Faults()))
    assert not reserve.give_up()
