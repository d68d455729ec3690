"""The models on this machine's disk: those that come with the package, and those pulled."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model import foreign
from model.architectures import config_from_dict
from model.bundled_models import bundled_models
from model.checkpoint_files import GGUF_SUFFIX
from model.files import ConfigError
from model.hub.base import has_base, place_of
from model.hub.base import remove as remove_base
from model.hub.cache import (
    INCOMPLETE,
    Repository,
    is_whole_folder,
    num_bytes,
    repositories,
    repository,
    single_files,
    whole_folders,
)
from model.hub.names import MAIN, HubName, parse_name
from model.weights import CheckpointError
from model.weights.folder import weight_files
from model.weights.gguf_file import part_names

#: The forms of an adapter, with its base on disk and without.
ADAPTED, NOT_PULLED = "adapter", "not pulled"


@dataclass(frozen=True)
class ModelOnDisk:
    """``name`` is what ``--model`` takes; ``form`` is that of the files, or why they do not do yet.

    ``num_bytes`` is the size of the weights. ``source`` is ``bundled`` or ``hub``.
    """

    name: str
    source: str
    family: str
    form: str
    num_bytes: int
    path: Path


def models_on_disk() -> list[ModelOnDisk]:
    """All models that can be loaded, and the downloads that were interrupted."""
    bundled = [
        _folder(name, "bundled", _family(folder), folder)
        for name, folder in bundled_models().items()
    ]
    pulled = [model for place in repositories() for model in _pulled(place)]
    return [*bundled, *pulled]


def remove(text: str) -> int:
    """Deletes what is on disk of ``OWNER/NAME[:FILE]`` and returns how many bytes that was.

    Of a bundled model that is an adapter this is its base. Raises `CheckpointError` for any other
    name, and where nothing is on disk; OSError.
    """
    folder = bundled_models().get(text)
    if folder is not None and has_base(folder):
        if freed := remove_base(folder):
            return freed
        raise CheckpointError(f"{text}: nothing is on disk")
    name = parse_name(text)
    if name is None or name.revision != MAIN:
        raise CheckpointError(f"{text}: only a pulled OWNER/NAME[:FILE] can be removed")
    place = repository(name.repository)
    parts = [] if name.file is None else part_names(name.file)
    if links := [link for part in parts for link in place.links_of(part)]:
        return place.unlink(links)
    if name.file is not None or not place.folder.is_dir():
        raise CheckpointError(f"{text}: nothing is on disk")
    freed = sum(file.stat().st_size for file in place.blobs.glob("*") if file.is_file())
    shutil.rmtree(place.folder)
    return freed


def _pulled(place: Repository) -> Iterator[ModelOnDisk]:
    for revision, snapshot in place.revisions():
        for folder in (snapshot, *whole_folders(snapshot)):
            within = None if folder == snapshot else str(folder.relative_to(snapshot))
            name = HubName(place.name, revision, within)
            if (model := _whole_folder(str(name), folder)) is not None:
                yield model
        files = single_files(snapshot)
        for file in files:
            path = str(file.relative_to(snapshot))
            if (family := _family_of_file(file)) is not None:
                size = num_bytes(file)
                form = file.suffix.removeprefix(".")
                full = str(HubName(place.name, revision, path))
                yield ModelOnDisk(full, "hub", family, form, size, file)
    partial = [p.stat().st_size for p in place.blobs.glob(f"*{INCOMPLETE}")]
    if sum(partial):
        yield ModelOnDisk(place.name, "hub", "", "incomplete", sum(partial), place.folder)


def _whole_folder(name: str, snapshot: Path) -> ModelOnDisk | None:
    """None for what cannot be loaded: others fill the cache too, and one must not hide the rest."""
    try:
        family = _family(snapshot) if is_whole_folder(snapshot) else None
        return None if family is None else _folder(name, "hub", family, snapshot)
    except (CheckpointError, ConfigError, OSError):
        return None


def _folder(name: str, source: str, family: str | None, folder: Path) -> ModelOnDisk:
    if has_base(folder):
        form = ADAPTED if place_of(folder) else NOT_PULLED
    else:
        form = weight_files(folder)[0].suffix.removeprefix(".")
    return ModelOnDisk(name, source, family or "", form, num_bytes(folder), folder)


def _family(folder: Path) -> str | None:
    """The kind of token mixing; None for a model that cannot be loaded."""
    try:
        values = foreign.read_config(folder)
        if foreign.is_foreign(values.get("model_type")):
            return str(values["model_type"])
        return config_from_dict(values).attention
    except (ConfigError, OSError):
        return None


def _family_of_file(path: Path) -> str | None:
    """The same for a single file, of which only the list of tensors is read."""
    from model.families.rwkv7.read import open_native, read_native
    from model.weights.gguf_file import GgufFile

    try:
        if path.suffix == GGUF_SUFFIX:
            return foreign.read_gguf(GgufFile(path), path.name)[0].attention
        return read_native(open_native(path), path.name)[0].attention
    except (CheckpointError, ConfigError):
        return None
