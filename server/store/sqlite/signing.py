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
    _write(new, secrets.token_bytes(_KEY_BYTES))
    new.rename(path)


def _write(path: Path, key: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(descriptor)


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
    _write(new / FILE_NAME, (store / FILE_NAME).read_bytes())
    return True
