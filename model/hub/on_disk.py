"""The models on this machine's disk: those that come with the package, and those pulled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from model import foreign
from model.architectures import config_from_dict
from model.bundled_models import bundled_models
from model.checkpoint_files import ADAPTER, GGUF_SUFFIX, config_file, weight_files
from model.files import ConfigError
from model.hub.base import has_base, place_of
from model.hub.base import remove as remove_base
from model.hub.listing import models_in, only_model
from model.hub.names import MAIN, HubName, parse_name
from model.weights import CheckpointError
from model.weights.gguf_file import part_names, part_paths

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, HFCacheInfo

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


def snapshot_of(name: HubName) -> Path | None:
    """The folder of what is on disk of the repository at the revision, if anything is."""
    from huggingface_hub import snapshot_download

    try:
        # Without patterns another program's interrupted download of all files would be an error.
        found = snapshot_download(
            name.repository, revision=name.revision, local_files_only=True, allow_patterns=[]
        )
    except (OSError, ValueError):  # not there, or not readable
        return None
    return Path(found)


def local(name: HubName) -> Path | None:
    """What is on disk of ``name`` as loading takes it, a folder or a file; None if incomplete.

    Raises `CheckpointError` where it has several models and ``name`` does not say which.
    """
    snapshot = snapshot_of(name)
    if snapshot is None:
        return None
    sizes = {_path_in(snapshot, file): file.stat().st_size for file in _files(snapshot)}
    model = only_model(name, _whole_models(snapshot), sizes)
    if model is None:
        return None
    found = snapshot / model
    is_file = all(part.is_file() for part in part_paths(found))
    return found if is_file or _is_whole_folder(found) else None


def models_on_disk() -> list[ModelOnDisk]:
    """All models that can be loaded."""
    bundled = [
        _described(name, "bundled", _family(folder) or "", folder)
        for name, folder in bundled_models().items()
    ]
    return [*bundled, *(model for repo in _repositories(_cache()) for model in _pulled(repo))]


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
    cache = _cache()
    repos = [repo for repo in _repositories(cache) if repo.repo_id == name.repository]
    if name.file is not None:
        plan = cache.delete_files(*(file for repo in repos for file in _files_of(name, repo)))
    else:
        # Of this repository alone: one that was renamed has the same commits.
        commits = [revision.commit_hash for repo in repos for revision in repo.revisions]
        plan = replace(cache, repos=frozenset(repos)).delete_revisions(*commits)
    if not plan.files and not plan.repos:
        raise CheckpointError(f"{text}: nothing is on disk")
    plan.execute()
    for path in (*plan.repos, *plan.blobs):
        if path.exists():
            raise CheckpointError(f"{path} could not be deleted")
    return plan.expected_freed_size


def num_bytes(model: Path) -> int:
    """The size of a file with all its parts, or of the weights of a folder with their base."""
    if has_base(model):
        files = [model / ADAPTER, *filter(None, [place_of(model)])]
    else:
        files = weight_files(model)
    return sum(file.stat().st_size for file in files)


def _cache() -> HFCacheInfo:
    from huggingface_hub import CacheNotFound, HFCacheInfo, scan_cache_dir

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return HFCacheInfo(0, repos=frozenset(), incomplete_files=frozenset(), warnings=[])


def _repositories(cache: HFCacheInfo) -> list[CachedRepoInfo]:
    """Every repository of models, in the order of names."""
    found = [repo for repo in cache.repos if repo.repo_type == "model"]
    return sorted(found, key=lambda repo: repo.repo_id)


def _pulled(repo: CachedRepoInfo) -> Iterator[ModelOnDisk]:
    for revision in sorted(repo.revisions, key=lambda revision: revision.commit_hash):
        name = min(revision.refs, default=revision.commit_hash)
        for model in _whole_models(revision.snapshot_path):
            path = revision.snapshot_path / model
            if (family := _family(path)) is not None:
                full = HubName(repo.repo_id, name, model or None)
                yield _described(str(full), "hub", family, path)


def _whole_models(snapshot: Path) -> list[str]:
    """The models of a snapshot that have all their files, as `models_in` names them."""
    found = models_in([_path_in(snapshot, file) for file in _files(snapshot)])
    return [m for m in found if (snapshot / m).is_file() or _is_whole_folder(snapshot / m)]


def _files(snapshot: Path) -> list[Path]:
    return [file for file in snapshot.rglob("*") if file.is_file()]


def _path_in(snapshot: Path, file: Path) -> str:
    return file.relative_to(snapshot).as_posix()


def _files_of(name: HubName, repo: CachedRepoInfo) -> Iterator[CachedFileInfo]:
    """The parts of the file that ``name`` says, or what is in the folder that it says."""
    assert name.file is not None
    parts = [PurePosixPath(part) for part in part_names(name.file)]
    for revision in repo.revisions:
        for file in revision.files:
            path = PurePosixPath(_path_in(revision.snapshot_path, file.file_path))
            if any(path.is_relative_to(part) for part in parts):
                yield file


def _is_whole_folder(folder: Path) -> bool:
    """Whether a folder has a config and all files of its weights.

    Others fill the cache too: a folder that is damaged is not whole, and does not hide the rest.
    """
    try:
        return config_file(folder).is_file() and all(f.is_file() for f in weight_files(folder))
    except (CheckpointError, ConfigError, OSError):
        return False


def _described(name: str, source: str, family: str, path: Path) -> ModelOnDisk:
    if has_base(path):
        form = ADAPTED if place_of(path) else NOT_PULLED
    else:
        form = weight_files(path)[0].suffix.removeprefix(".")
    return ModelOnDisk(name, source, family, form, num_bytes(path), path)


def _family(path: Path) -> str | None:
    """The kind of token mixing; None for a model that cannot be loaded.

    Of a single file only the list of tensors is read.
    """
    from model.families.rwkv7.read import open_native, read_native
    from model.weights.gguf_file import GgufFile

    try:
        if path.is_file():
            if path.suffix == GGUF_SUFFIX:
                return foreign.read_gguf(GgufFile(path), path.name)[0].attention
            return read_native(open_native(path), path.name)[0].attention
        values = foreign.read_config(path)
        if foreign.is_foreign(values.get("model_type")):
            return str(values["model_type"])
        return config_from_dict(values).attention
    except (CheckpointError, ConfigError, OSError):
        return None
