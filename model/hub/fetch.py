"""One file of a repository, downloaded into the cache: resumable, and checked before it is used."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Protocol

from model.hub.cache import INCOMPLETE, Repository
from model.hub.listing import HubFile, Listing, size_text
from model.hub.remote import download
from model.weights import CheckpointError

_BLOCK = 1 << 20
#: A digest of this length is SHA-256 of the content; git's has 40.
_SHA256_CHARS = 64


class Say(Protocol):
    """Tells the user what happens, in a line."""

    def __call__(self, line: str, /) -> object: ...


def is_fetched(place: Repository, file: HubFile) -> bool:
    """Whether the whole file is in the cache."""
    blob = place.blobs / file.digest
    return blob.is_file() and blob.stat().st_size == file.num_bytes


def num_bytes_fetched(place: Repository, file: HubFile) -> int:
    """What an interrupted download has left."""
    partial = _partial(place, file)
    return min(partial.stat().st_size, file.num_bytes) if partial.is_file() else 0


def fetch(listing: Listing, place: Repository, file: HubFile, say: Say) -> None:
    """Puts ``file`` into the cache, unless it is there.

    Bytes of an earlier, interrupted download are kept. A file whose content is not what the
    hub states is discarded. Raises `CheckpointError` or OSError.
    """
    blob = place.blobs / file.digest
    partial = _partial(place, file)
    with partial.open("ab") as out:
        fcntl.flock(out, fcntl.LOCK_EX)  # another process may download the same file
        out.seek(0, os.SEEK_END)  # and have written on since it was opened
        if is_fetched(place, file):
            partial.unlink(missing_ok=True)
            return
        if out.tell() > file.num_bytes:
            out.truncate(0)
            out.seek(0)
        if 0 < out.tell() < file.num_bytes:
            say(f"{file.path}: resuming at {size_text(out.tell())} of {size_text(file.num_bytes)}")
        download(listing, file, out)
        out.flush()
        found = _digest(partial, file)
        if found != file.digest:
            out.truncate(0)
            raise CheckpointError(
                f"{listing.name.repository}: {file.path} was damaged on the way:"
                f" its digest is {found}, the hub states {file.digest}"
            )
        os.fsync(out.fileno())
        partial.replace(blob)


def _partial(place: Repository, file: HubFile) -> Path:
    return place.blobs / f"{file.digest}{INCOMPLETE}"


def _digest(path: Path, file: HubFile) -> str:
    """In hex: SHA-256, or what git calls a blob's id."""
    if len(file.digest) == _SHA256_CHARS:
        digest = hashlib.sha256()
    else:
        header = f"blob {path.stat().st_size}\0".encode()
        digest = hashlib.sha1(header, usedforsecurity=False)
    with path.open("rb") as content:
        while block := content.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
