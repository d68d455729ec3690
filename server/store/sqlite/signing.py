"""The key that vouches for exported sessions: made once, and kept with the store."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from server.store.errors import StoreFailed

FILE_NAME = "signing.key"
_KEY_BYTES = 32


def signing_key(store: Path) -> bytes:
    """The key of the store in a directory, made if there is none. Raises `OSError`, `StoreFailed`.

    Only one process may ask at a time.
    """
    path = store / FILE_NAME
    if not path.exists():
        _make(path)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise StoreFailed(f"{path} is not a key of {_KEY_BYTES} bytes")
    return key


def _make(path: Path) -> None:
    """Whole or not at all, and never readable by others."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(_KEY_BYTES))
        file.flush()
        os.fsync(descriptor)
    new.rename(path)


def is_key(path: Path) -> bool:
    """Whether the store in a directory has a key that can be used."""
    try:
        return len((path / FILE_NAME).read_bytes()) == _KEY_BYTES
    except OSError:
        return False


def copy_key(store: Path, new: Path) -> bool:
    """Gives another directory the key of ``store``; False where there is none that can be used."""
    if not is_key(store):
        return False
    descriptor = os.open(new / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write((store / FILE_NAME).read_bytes())
    return True
