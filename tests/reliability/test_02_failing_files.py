"""(2) Whatever write, sync, rename or unlink fails: what was committed is there, whole.

A script of commits runs while the disk fails once, or from some moment on, at
every place where it can. Then it runs on, on the same store or a new one.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from server.store.base import StoreError
from server.store.sqlite.database import Waiting
from server.store.sqlite.maintenance import problems
from server.store.sqlite.store import SqliteStore, open_store
from tests.server.store.faults import Faults, FaultyFiles, FaultyVfs
from tests.server.store.records import IDENTITY
from tests.server.store.script import LIMITS, Script


def opened(path: Path, faults: Faults, vfs: FaultyVfs) -> SqliteStore:
    return open_store(
        path,
        IDENTITY,
        limits=LIMITS,
        files=FaultyFiles(faults),
        vfs=vfs.name,
        waiting=Waiting(lease_s=0.0),
    )


def number_of_operations(path: Path) -> int:
    faults = Faults()
    vfs = FaultyVfs(faults)
    store = opened(path, faults, vfs)
    Script().run(store, faults)
    store.close()
    return faults.count


#: The short form fails every so many operations, beginning elsewhere in each test.
STRIDE = 96


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("code", "lasting", "first"),
    [
        pytest.param(errno.EIO, False, 1, id="EIO-once"),
        pytest.param(errno.EIO, True, 25, id="EIO-lasting"),
        pytest.param(errno.ENOSPC, False, 49, id="ENOSPC-once"),
        pytest.param(errno.ENOSPC, True, 73, id="ENOSPC-lasting"),
    ],
)
def test_what_was_committed_outlasts_a_failure(
    tmp_path: Path, code: int, lasting: bool, first: int, long: bool
) -> None:
    count = number_of_operations(tmp_path / "none")
    assert count > 100
    for at in range(1, count + 1) if long else range(first, count + 1, STRIDE):
        path = tmp_path / str(at)
        faults = Faults(at, code, lasting)
        vfs = FaultyVfs(faults)
        script = Script()
        try:
            store = opened(path, faults, vfs)
        except StoreError:
            assert faults.failed
            faults.heal()
            store = opened(path, faults, vfs)
        script.run(store, faults)
        store.close()
        faults.heal()
        assert faults.failed
        again = open_store(path, IDENTITY, limits=LIMITS)
        script.check(again)
        again.close()
        assert list(problems(path)) == []
