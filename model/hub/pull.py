"""A model of the hub on this machine's disk: found there, or downloaded.

Files lie in the cache of the hub's library, which other programs share; the library writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from model.hub.beginnings import check_beginnings
from model.hub.listing import HubFile, Listing, choose, size_text
from model.hub.names import HubName
from model.hub.on_disk import local, snapshot_of
from model.hub.remote import cached, download, link_unchanged, read_listing, record_revision
from model.weights import CheckpointError
from model.weights.folder import weight_files

logger = logging.getLogger("everstream.hub")


#: Tells the user what happens, in a line.
Say = Callable[[str], object]


def local_or_pulled(name: HubName) -> Path:
    """The folder or file of ``name``. The hub is asked only where it is not on disk.

    Raises `CheckpointError` or `ConfigError`.
    """
    return local(name) or pull(name, logger.info)


def pull(name: HubName, say: Say) -> Path:
    """Downloads what ``name`` needs and is not there, checks it, and returns what to load.

    Config, tokenizer and the beginning of the weights are read before the rest of these, so a
    model that cannot be served costs little. What is there is checked too. The revision is
    recorded last: what was there before stays usable until all is there.
    Raises `CheckpointError` or `ConfigError`.
    """
    listing = read_listing(name)
    choice = choose(listing)
    try:
        _link_unchanged(listing)
        small = _download(listing, choice.small, say)
        weights = choice.weights or _shards(listing, choice.small, small)
        check_beginnings(listing, small, weights, choice.is_folder)
        _download(listing, weights, say)
    except OSError as error:
        raise CheckpointError(f"{error.filename or name}: {error.strerror}") from error
    record_revision(name)
    if (found := local(name)) is None:
        raise CheckpointError(f"{name} is not commit {listing.commit} any more: pull it again")
    return found


def _link_unchanged(listing: Listing) -> None:
    """What was pulled of an earlier commit, and is the same in this one, stays usable."""
    before = snapshot_of(listing.name)
    if before is None:
        return
    for file in listing.files.values():
        if (before / file.path).is_file() and cached(listing, file) is None:
            link_unchanged(listing, file)


def _download(listing: Listing, files: Sequence[HubFile], say: Say) -> list[Path]:
    missing = [file for file in files if cached(listing, file) is None]
    if missing:
        num_bytes = sum(file.num_bytes for file in missing)
        what = missing[0].path if len(missing) == 1 else f"{len(missing)} files"
        say(f"{listing.name.repository}: downloading {what}, {size_text(num_bytes)}")
    paths = []
    for file in files:
        paths.append(download(listing, file))
        if file in missing:
            say(f"{file.path}: {size_text(file.num_bytes)}, digest verified")
    return paths


def _shards(
    listing: Listing, small: Sequence[HubFile], paths: Sequence[Path]
) -> tuple[HubFile, ...]:
    """The files that the index names, which is the last of the small ones."""
    folder = small[-1].path.removesuffix(paths[-1].name)
    names = [f"{folder}{file.name}" for file in weight_files(paths[-1].parent)]
    for name in names:
        if name not in listing.files:
            raise CheckpointError(f"{listing.name} lacks {name}, which its index names")
    return tuple(listing.files[name] for name in names)
