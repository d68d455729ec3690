"""Of two who make the same thing, one waits."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from tests.exclusive import exclusive


def test_second_waits_until_the_first_is_done(tmp_path: Path) -> None:
    done = []

    def second() -> None:
        with exclusive(tmp_path):
            done.append("second")

    thread = threading.Thread(target=second)
    with exclusive(tmp_path):
        thread.start()
        thread.join(0.1)
        done.append("first")
    thread.join()
    assert done == ["first", "second"]


def test_other_folders_do_not_wait(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    with exclusive(tmp_path), exclusive(tmp_path / "inside"):
        assert is_held(tmp_path)
        assert is_held(tmp_path / "inside")
        assert not is_held(tmp_path.parent)


def test_failing_block_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path):
        raise ZeroDivisionError
    assert not is_held(tmp_path)


def is_held(folder: Path) -> bool:
    """Whether a block runs for ``folder``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)
