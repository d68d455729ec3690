"""Requests to the hub, by the public API of its library: listings, downloads, beginnings of files.

The library's settings hold: ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and the others.
Every failure becomes a `CheckpointError` of one line.

Digests are compared here: the library's downloads compare sizes alone, and its
`HfApi.verify_repo_checksums` reads all models of a repository that are on disk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from model.hub.listing import HubFile, Listing
from model.hub.names import COMMIT, HubName, is_safe_path
from model.weights import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling


#: Characters of the hub's own words in a message.
MAX_SAID = 200
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
#: A digest of this length is SHA-256 of the content; git's has 40.
_SHA256_CHARS = 64
_BLOCK = 1 << 20
#: Headers that the library makes paths in the cache of, without a check.
_NAMING = ("ETag", "X-Linked-Etag", "X-Repo-Commit")


def read_listing(name: HubName) -> Listing:
    """The files of ``name``'s repository at its revision. Raises `CheckpointError`."""
    from huggingface_hub import HfApi, constants

    with _failures_as_lines(name):
        info = HfApi().model_info(
            name.repository,
            revision=name.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    if info.sha is None or not re.fullmatch(COMMIT, info.sha):
        raise CheckpointError(f"{name}: the hub names no commit")
    files = [_file(each) for each in info.siblings or []]
    return Listing(name, info.sha, {file.path: file for file in files if file is not None})


def cached(listing: Listing, file: HubFile) -> Path | None:
    """Where the file is on disk, if it is."""
    from huggingface_hub import try_to_load_from_cache

    repository = listing.name.repository
    found = try_to_load_from_cache(repository, file.path, revision=listing.commit)
    return Path(found) if isinstance(found, str) else None


def download(listing: Listing, file: HubFile) -> Path:
    """Where the file is, downloaded if it is not on disk; its digest is that which the hub states.

    A connection that breaks is tried again from where it broke. A damaged file is deleted.
    Raises `CheckpointError`.
    """
    from huggingface_hub import hf_hub_download

    repository = listing.name.repository
    with _failures_as_lines(listing.name, file.path):
        path = Path(hf_hub_download(repository, file.path, revision=listing.commit))
    if (found := _digest(path, file)) != file.digest:
        content = path.resolve()
        path.unlink()
        content.unlink(missing_ok=True)
        raise CheckpointError(
            f"{repository}: {file.path} was damaged on the way:"
            f" its digest is {found}, the hub states {file.digest}"
        )
    return path


def link_unchanged(listing: Listing, file: HubFile) -> None:
    """Gives a file that an earlier commit has its place in this one, if it is the same there.

    Nothing is downloaded. Raises `CheckpointError`.
    """
    from huggingface_hub import hf_hub_download

    repository = listing.name.repository
    with _failures_as_lines(listing.name, file.path):
        if hf_hub_download(repository, file.path, revision=listing.commit, dry_run=True).is_cached:
            hf_hub_download(repository, file.path, revision=listing.commit)


def record_revision(name: HubName) -> None:
    """Records on disk which commit the revision is. Raises `CheckpointError`."""
    from huggingface_hub import HfApi

    with _failures_as_lines(name):
        HfApi().resolve_revision(name.repository, revision=name.revision)


@contextmanager
def opened(listing: Listing, file: HubFile) -> Iterator[BinaryIO]:
    """The file, to be read from its first byte on. What is not read is not downloaded.

    Raises `CheckpointError`, also for what fails in the block.
    """
    from huggingface_hub import HfFileSystem

    path = f"{listing.name.repository}/{file.path}"
    with _failures_as_lines(listing.name, file.path):
        stream = HfFileSystem().open(path, revision=listing.commit, block_size=0)
        with cast(BinaryIO, stream):
            yield cast(BinaryIO, stream)


def _file(sibling: RepoSibling) -> HubFile | None:
    """None for a file that cannot be stored under the name or the digest that the hub gives it."""
    digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    if sibling.size is None or digest is None or not _DIGEST.fullmatch(digest):
        return None
    if not is_safe_path(sibling.rfilename):
        return None
    return HubFile(sibling.rfilename, sibling.size, digest)


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


@contextmanager
def _failures_as_lines(name: HubName, path: str | None = None) -> Iterator[None]:
    what = f"{name}" if path is None else f"{name.repository}: {path}"
    try:
        _guard_session()
        yield
    except Exception as error:  # of an HTTP library, and which one depends on the hub's version
        reason = _reason(error, name)
        raise CheckpointError(f"{what} is not available from the hub: {reason}") from error


def _guard_session() -> None:
    """Has each answer checked by `_refuse_paths`, once."""
    from huggingface_hub import get_session

    session = get_session()
    hooks = session.event_hooks
    if _refuse_paths not in hooks["response"]:
        session.event_hooks = {**hooks, "response": [*hooks["response"], _refuse_paths]}


def _refuse_paths(response: Any) -> None:
    for header in _NAMING:
        value = response.headers.get(header, "").removeprefix("W/")
        if "/" in value or "\\" in value or ".." in value:
            raise ValueError(f"its {header} is {value!r:.80}")


def _reason(error: Exception, name: HubName) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the library looked at the disk
    match error:
        case errors.GatedRepoError():
            return "it is gated: accept its conditions on its page, and give a token in HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return "there is no such repository, or it is private and needs a token in HF_TOKEN"
        case errors.RevisionNotFoundError():
            return f"it has no revision {name.revision!r}"
        case errors.OfflineModeIsEnabled():
            return "it is not on disk, and HF_HUB_OFFLINE is set"
        case errors.HfHubHTTPError():
            said = error.response.headers.get("X-Error-Message", "")[:MAX_SAID]
            said = f": {said}" if said.isprintable() and said else ""
            return f"the hub answered {error.response.status_code}{said}"
    return next(iter(str(error).splitlines()), "") or type(error).__name__
