"""Where downloads lie: in the cache of the hub's library, in its layout, which others share.

A repository is a folder ``models--OWNER--NAME``. ``blobs`` has the files by their digests,
``snapshots/COMMIT`` links to them by their names, and ``refs`` has the commit of each branch
and tag. A download in progress is ``blobs/DIGEST.incomplete``.

``HF_HOME`` and ``HF_HUB_CACHE`` move the cache, as everywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint_files import ADAPTER, CONFIGS, FILE_SUFFIXES, config_file
from model.files import ConfigError
from model.hub.base import has_base, place_of
from model.hub.listing import HubFile, several
from model.hub.names import COMMIT, HubName, is_safe_path
from model.weights import FORMS, CheckpointError
from model.weights.folder import weight_files
from model.weights.gguf_file import is_first_part, part_paths

_FOLDER = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)", re.ASCII)
INCOMPLETE = ".incomplete"


def cache_folder() -> Path:
    """The folder of the library's cache, which may not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


@dataclass(frozen=True)
class Repository:
    """The folder of one repository in the cache."""

    name: str
    folder: Path

    @property
    def blobs(self) -> Path:
        return self.folder / "blobs"

    def snapshot(self, commit: str) -> Path:
        """The files of a commit that are on disk."""
        return self.folder / "snapshots" / commit

    def commit_of(self, revision: str) -> str | None:
        """The commit that a revision was when it was last pulled."""
        if re.fullmatch(COMMIT, revision):
            return revision
        try:
            commit = (self.folder / "refs" / revision).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return commit if re.fullmatch(COMMIT, commit) else None

    def revisions(self) -> Iterator[tuple[str, Path]]:
        """Each snapshot with the name it is found by: a branch or tag, else its commit."""
        refs = self.folder / "refs"
        names = sorted(str(p.relative_to(refs)) for p in refs.rglob("*") if p.is_file())
        by_commit = {self.commit_of(name): name for name in reversed(names) if is_safe_path(name)}
        for snapshot in sorted((self.folder / "snapshots").glob("*")):
            if re.fullmatch(COMMIT, snapshot.name):
                yield by_commit.get(snapshot.name, snapshot.name), snapshot

    def link(self, commit: str, file: HubFile) -> None:
        """Gives a blob the name that its file has at ``commit``. Raises OSError."""
        place = self.snapshot(commit) / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.with_name(f".{place.name}.{os.getpid()}")
        new.unlink(missing_ok=True)  # of a process that died here
        new.symlink_to(os.path.relpath(self.blobs / file.digest, place.parent))
        new.replace(place)

    def links_of(self, path: str) -> list[Path]:
        """The links to a file, or to those in a folder, at each commit where it is on disk."""
        places = [place / path for place in (self.folder / "snapshots").glob("*")]
        inside = [file for place in places for file in place.rglob("*")]
        return [file for file in (*places, *inside) if file.is_symlink()]

    def unlink(self, links: Collection[Path]) -> int:
        """Deletes links, and the blobs that have no other; how many bytes. Raises OSError."""
        blobs = {link.resolve() for link in links}
        for link in links:
            link.unlink()
        others = (self.folder / "snapshots").rglob("*")
        blobs -= {link.resolve() for link in others if link.is_symlink()}
        freed = sum(blob.stat().st_size for blob in blobs)
        for blob in blobs:
            blob.unlink()
        return freed

    def set_revision(self, revision: str, commit: str) -> None:
        """Records that ``revision`` is ``commit``. Raises OSError."""
        if revision == commit:
            return
        place = self.folder / "refs" / revision
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.with_name(f".{place.name}.{os.getpid()}")
        new.write_text(commit, "ascii")
        new.replace(place)


def repository(name: str) -> Repository:
    """The place of a repository ``OWNER/NAME``, which may not exist."""
    return Repository(name, cache_folder() / f"models--{name.replace('/', '--')}")


def repositories() -> Iterator[Repository]:
    """Every repository of models in the cache, in the order of names."""
    for folder in sorted(cache_folder().glob("models--*")):
        if match := _FOLDER.fullmatch(folder.name):
            yield Repository(f"{match['owner']}/{match['name']}", folder)


def local(name: HubName) -> Path | None:
    """What is on disk of ``name`` as loading takes it, a folder or a file; None if incomplete.

    Raises `CheckpointError` where it has several models and ``name`` does not say which.
    """
    place = repository(name.repository)
    commit = place.commit_of(name.revision)
    if commit is None:
        return None
    snapshot = place.snapshot(commit)
    if name.file is not None:
        found = snapshot / name.file
        is_file = all(part.is_file() for part in part_paths(found))
        return found if is_file or is_whole_folder(found) else None
    if is_whole_folder(snapshot):
        return snapshot
    models = single_files(snapshot) + whole_folders(snapshot)
    if len(models) > 1:
        raise several(name, {str(m.relative_to(snapshot)): num_bytes(m) for m in models})
    return models[0] if models else None


def is_whole_folder(folder: Path) -> bool:
    """Whether a folder has a config and all files of its weights."""
    if not config_file(folder).is_file():
        return False
    if not any((folder / name).is_file() for form in FORMS for name in form):
        return False
    return all(file.is_file() for file in weight_files(folder))


def whole_folders(snapshot: Path) -> list[Path]:
    """The models of a snapshot that are folders below it."""
    folders = sorted({file.parent for name in CONFIGS for file in snapshot.rglob(name)})
    return [folder for folder in folders if folder != snapshot and _is_whole(folder)]


def _is_whole(folder: Path) -> bool:
    """The same for a folder that others filled: one that is damaged must not hide the rest."""
    try:
        return is_whole_folder(folder)
    except (CheckpointError, ConfigError, OSError):
        return False


def single_files(snapshot: Path) -> list[Path]:
    """The models of a snapshot that are one file, and the first parts of those that are split."""
    files = (p for p in snapshot.rglob("*") if p.name.endswith(FILE_SUFFIXES))
    return sorted(
        file
        for file in files
        if is_first_part(file.name) and all(part.is_file() for part in part_paths(file))
    )


def num_bytes(model: Path) -> int:
    """The size of a file with all its parts, or of the weights of a folder with their base."""
    if has_base(model):
        files = [model / ADAPTER, *filter(None, [place_of(model)])]
    else:
        files = weight_files(model)
    return sum(file.stat().st_size for file in files)
