"""The named states of an embedded store: a file for each, in a folder of their own.

A file is whole or it is not there: it is written next to the old one, synced, and then renamed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson

from server.store.codec import Malformed, decode_value
from server.store.errors import StoreError
from server.store.files import Chunk, Files, replace
from server.store.named_state import read_any_identity

logger = logging.getLogger(__name__)

DIR_NAME = "named"
SUFFIX = ".safetensors"
#: Bytes of a header, which has the text of the prompt.
_MAX_HEADER_BYTES = 64 << 20


class NamedFiles:
    """Those in the folder ``path / DIR_NAME``. For one thread, in the one process that has it."""

    def __init__(self, path: Path, files: Files, is_full: bool) -> None:
        self._dir, self._files, self._is_full = path / DIR_NAME, files, is_full
        self._digests: dict[str, str] | None = None

    def digests(self) -> dict[str, str]:
        """The digest of each state by its name. What cannot be read is logged and left out."""
        if self._digests is None:
            found = ((file.stem, _digest(file)) for file in files_in(self._dir.parent))
            self._digests = {name: digest for name, digest in found if digest is not None}
        return dict(self._digests)

    def read(self, name: str) -> bytes | None:
        """The file of a state, if there is one. Raises `OSError`."""
        if name not in self.digests():
            return None
        return self._files.read(self._place(name))

    def put(self, name: str, digest: str, parts: Sequence[Chunk]) -> None:
        """Stores a state durably, and replaces one of the same name. Raises `OSError`."""
        digests, place = self.digests(), self._place(name)
        self._dir.mkdir(mode=0o700, exist_ok=True)
        replace(self._files, place, parts, self._is_full)
        if self._is_full:
            self._files.sync_dir(self._dir)
            self._files.sync_dir(self._dir.parent)
        self._digests = {**digests, name: digest}

    def remove(self, name: str) -> bool:
        """Whether there was one. Raises `OSError`."""
        digests = self.digests()
        if digests.pop(name, None) is None:
            return False
        self._files.unlink(self._place(name))
        if self._is_full:
            self._files.sync_dir(self._dir)
        self._digests = digests
        return True

    def _place(self, name: str) -> Path:
        return self._dir / f"{name}{SUFFIX}"


def files_in(path: Path) -> list[Path]:
    """Those of the store at ``path``, by name."""
    return sorted((path / DIR_NAME).glob(f"*{SUFFIX}"))


def broken_named(path: Path) -> Iterator[tuple[Path, str]]:
    """Each file of the store at ``path`` that is not a whole state, and why."""
    for file in files_in(path):
        try:
            read_any_identity(file.read_bytes())
        except OSError as error:
            yield file, str(error.strerror)
        except StoreError as error:
            yield file, error.message


def _digest(path: Path) -> str | None:
    """What the header says; the file itself is checked when it is read."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise Malformed("its header is too large")
            about = orjson.loads(file.read(size))["__metadata__"]
        origin = decode_value(about["value"]).origin
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("the named state %s cannot be read: %s", path, error)
        return None
    return None if origin is None else origin.digest
