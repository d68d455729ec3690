"""What an error says to a client and to the operator: paths and hosts are for the latter."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from server.api.errors import error_body
from server.store.base import DiskFiles, SnapshotBroken, StoreError, StoreFailed
from server.store.postgres import database as shared
from server.store.sqlite.database import failure
from server.store.sqlite.store import SqliteStore, open_store
from tests.server.store.records import IDENTITY, Writer, block


class Unreadable(DiskFiles):
    """Fails to read with ``code`` while it is set, and names the file as the system does."""

    code = 0

    def read(self, path: Path) -> bytes:
        if self.code:
            raise OSError(self.code, os.strerror(self.code), str(path))
        return super().read(path)


def stored(path: Path, files: DiskFiles) -> SqliteStore:
    """A store that has one session with a state, and nothing of it in memory."""
    store = open_store(path, IDENTITY, files=files)
    store.commit([Writer().opened(block(3), (1, 2, 3))])
    store.close()
    return open_store(path, IDENTITY, files=files)


def check_hidden(error: StoreError, secret: str) -> None:
    assert secret not in error_body(error).decode()
    assert secret in str(error)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_state_that_cannot_be_opened_for_the_moment_is_not_broken(
    tmp_path: Path, code: int
) -> None:
    files = Unreadable()
    store = stored(tmp_path / "store", files)
    files.code = code
    with pytest.raises(StoreFailed) as raised:
        store.load("s1", "ann")
    check_hidden(raised.value, str(tmp_path))
    files.code = 0
    assert store.load("s1", "ann").value.state is not None
    store.close()


def test_state_that_cannot_be_read_is_broken(tmp_path: Path) -> None:
    files = Unreadable()
    store = stored(tmp_path / "store", files)
    files.code = errno.EIO
    with pytest.raises(SnapshotBroken) as raised:
        store.load("s1", "ann")
    check_hidden(raised.value, str(tmp_path))
    store.close()


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (failure, OSError(errno.EMFILE, "Too many open files", "/var/lib/everstream/x")),
        (shared.failure, psycopg.OperationalError("no answer from /var/lib/everstream/x")),
    ],
)
def test_failure_tells_clients_no_paths(
    failure: Callable[[Exception], StoreError], error: Exception
) -> None:
    check_hidden(failure(error), "/var/lib/everstream")
