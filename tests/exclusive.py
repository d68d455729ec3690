"""What several processes may want to make at the same time is made by one, and the others wait."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.empty_home import is_worker


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """While the block runs, no other is in a block for the same folder, which must stay."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def folder_of_run(name: str, factory: pytest.TempPathFactory) -> Path:
    """A folder of this name that all workers of a test run share; a block makes what is in it."""
    folder = factory.getbasetemp()
    if is_worker():
        folder = folder.parent
    shared = folder / name
    shared.mkdir(exist_ok=True)
    return shared
