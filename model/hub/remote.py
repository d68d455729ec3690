"""Requests to the hub, made by its library: what a repository has, and the bytes of a file.

The library's settings hold: ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and the others.
Every failure becomes a `CheckpointError` of one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO

from model.hub.listing import HubFile, Listing
from model.hub.names import COMMIT, HubName, is_safe_path
from model.weights import CheckpointError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

#: Characters of the hub's own words in a message.
MAX_SAID = 200
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


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
    if not re.fullmatch(COMMIT, info.sha or ""):
        raise CheckpointError(f"{name}: the hub names no commit")
    assert info.sha is not None
    files = [_file(each) for each in info.siblings or []]
    return Listing(name, info.sha, {file.path: file for file in files if file is not None})


def download(listing: Listing, file: HubFile, out: BinaryIO) -> None:
    """Appends to ``out`` what it lacks of ``file``, with a progress bar on a terminal.

    A connection that breaks is tried again; what was received stays in ``out``.
    Raises `CheckpointError`.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    with _failures_as_lines(listing.name, file.path):
        http_get(
            hf_hub_url(listing.name.repository, file.path, revision=listing.commit),
            out,
            resume_size=out.tell(),
            headers=build_hf_headers(),
            expected_size=file.num_bytes,
            displayed_filename=file.path,
        )


def read_range(listing: Listing, file: HubFile, start: int, stop: int) -> bytes:
    """The bytes of ``file`` from ``start`` to ``stop``. Raises `CheckpointError`."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(listing.name.repository, file.path, revision=listing.commit)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
    data = bytearray()
    with _failures_as_lines(listing.name, file.path):
        if stop > start:
            with _streamed(url, headers) as (status, chunks):
                # A storage that ignores the range sends the whole file: no more of it is read.
                place = 0 if status == HTTPStatus.OK else start
                for chunk in chunks:
                    data += chunk[max(0, start - place) : max(0, stop - place)]
                    place += len(chunk)
                    if place >= stop:
                        break
        if len(data) != stop - start:
            raise ValueError(f"{len(data)} bytes came instead of {stop - start}")
    return bytes(data)


@contextmanager
def _streamed(url: str, headers: dict[str, str]) -> Iterator[tuple[int, Iterator[bytes]]]:
    """The status of an answer, and its body as it comes."""
    from huggingface_hub import constants

    utils: Any = import_module("huggingface_hub.utils")  # what it has depends on the version
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    stream = getattr(utils, "http_stream_backoff", None)
    if stream is None:  # before version 1.0
        answer = utils.http_backoff("GET", url, headers=headers, timeout=timeout, stream=True)
    else:
        answer = stream("GET", url, headers=headers, timeout=timeout)
    with answer as response:
        utils.hf_raise_for_status(response)
        body = response.iter_bytes() if stream else response.iter_content(1 << 16)
        yield response.status_code, body


def _file(sibling: RepoSibling) -> HubFile | None:
    """None for a file that cannot be stored under the name or the digest that the hub gives it."""
    digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    if sibling.size is None or not _DIGEST.fullmatch(digest or ""):
        return None
    if not is_safe_path(sibling.rfilename):
        return None
    assert digest is not None
    return HubFile(sibling.rfilename, sibling.size, digest)


@contextmanager
def _failures_as_lines(name: HubName, path: str | None = None) -> Iterator[None]:
    from huggingface_hub import errors

    what = f"{name}" if path is None else f"{name.repository}: {path}"
    try:
        yield
    except errors.GatedRepoError as error:
        reason = "it is gated: accept its conditions on its page, and give a token in HF_TOKEN"
        raise _failure(what, reason) from error
    except errors.RepositoryNotFoundError as error:
        reason = "there is no such repository, or it is private and needs a token in HF_TOKEN"
        raise _failure(what, reason) from error
    except errors.RevisionNotFoundError as error:
        raise _failure(what, f"it has no revision {name.revision!r}") from error
    except errors.OfflineModeIsEnabled as error:
        raise _failure(what, "it is not on disk, and HF_HUB_OFFLINE is set") from error
    except errors.HfHubHTTPError as error:
        said = error.response.headers.get("X-Error-Message", "")[:MAX_SAID]
        said = f": {said}" if said.isprintable() and said else ""
        reason = f"the hub answered {error.response.status_code}{said}"
        raise _failure(what, reason) from error
    except Exception as error:  # of an HTTP library, and which one depends on the hub's version
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise _failure(what, reason) from error


def _failure(what: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{what} is not available from the hub: {reason}")
