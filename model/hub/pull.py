"""A model of the hub on this machine's disk: found there, or downloaded."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from model import foreign
from model.architectures import config_from_dict
from model.hub.beginnings import check_beginnings
from model.hub.cache import Repository, local, repository
from model.hub.fetch import Say, fetch, is_fetched, num_bytes_fetched
from model.hub.listing import HubFile, Listing, choose, size_text
from model.hub.names import HubName
from model.hub.remote import read_listing
from model.weights import CheckpointError
from model.weights.folder import weight_files

logger = logging.getLogger("everstream.hub")


def local_or_pulled(name: HubName) -> Path:
    """The folder or file of ``name``. The hub is asked only where it is not on disk.

    Raises `CheckpointError` or `ConfigError`.
    """
    return local(name) or pull(name, logger.info)


def pull(name: HubName, say: Say) -> Path:
    """Downloads what ``name`` needs and is not there, checks it, and returns what to load.

    Config, tokenizer and the beginning of the weights are read before the rest of these, so a
    model that cannot be served costs little.
    What was there before stays usable until all is there. Raises `CheckpointError` or
    `ConfigError`.
    """
    listing = read_listing(name)
    choice = choose(listing)
    place = repository(name.repository)
    try:
        place.blobs.mkdir(parents=True, exist_ok=True)
        _fetch_all(listing, place, choice.small, say)
        weights = choice.weights
        if choice.folder is not None:
            _check_config(place.snapshot(listing.commit) / choice.folder)
            weights = weights or _shards(listing, place, choice.folder)
        check_beginnings(listing, place, choice, weights)
        _fetch_all(listing, place, weights, say)
        _link_known(listing, place)
        place.set_revision(name.revision, listing.commit)
    except OSError as error:
        raise CheckpointError(f"{error.filename or place.folder}: {error.strerror}") from error
    if (found := local(name)) is None:
        raise CheckpointError(f"{name}: the hub answered with commit {listing.commit}")
    return found


def _fetch_all(listing: Listing, place: Repository, files: Sequence[HubFile], say: Say) -> None:
    missing = [file for file in files if not is_fetched(place, file)]
    _check_space(place, missing)
    if missing:
        size = size_text(sum(file.num_bytes for file in missing))
        what = missing[0].path if len(missing) == 1 else f"{len(missing)} files"
        say(f"{listing.name.repository}: downloading {what}, {size}")
    for file in files:
        if file in missing:
            fetch(listing, place, file, say)
            say(f"{file.path}: {size_text(file.num_bytes)}, digest verified")
        place.link(listing.commit, file)


def _link_known(listing: Listing, place: Repository) -> None:
    """What was pulled of an earlier commit, and is the same in this one, stays usable."""
    for file in listing.files.values():
        if is_fetched(place, file):
            place.link(listing.commit, file)


def _check_space(place: Repository, files: Sequence[HubFile]) -> None:
    needed = sum(file.num_bytes - num_bytes_fetched(place, file) for file in files)
    free = shutil.disk_usage(place.blobs).free
    if needed > free:
        raise CheckpointError(
            f"{place.folder}: {size_text(needed)} are needed, {size_text(free)} are free"
        )


def _shards(listing: Listing, place: Repository, folder: str) -> tuple[HubFile, ...]:
    """The files that the index names, which has been fetched."""
    paths = weight_files(place.snapshot(listing.commit) / folder)
    names = [f"{folder}{path.name}" for path in paths]
    for name in names:
        if name not in listing.files:
            raise CheckpointError(f"{listing.name} lacks {name}, which its index names")
    return tuple(listing.files[name] for name in names)


def _check_config(folder: Path) -> None:
    """Raises `ConfigError` for a family that is not supported."""
    values = foreign.read_config(folder)
    if not foreign.is_foreign(values.get("model_type")):
        config_from_dict(values)
