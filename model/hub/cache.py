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

from model.checkpoint_files import CONFIG, FILE_SUFFIXES
from model.hub.listing import HubFile, several
from model.hub.names import COMMIT, HubName, is_safe_path
from model.split_files import is_first_part, part_paths
from model.weight_files import weight_files
from model.weights import FORMS

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

    def blobs_of(self, path: str) -> set[Path]:
        """The content of a file at each commit where it is on disk."""
        snapshots = (self.folder / "snapshots").glob("*")
        return {(place / path).resolve() for place in snapshots if (place / path).is_file()}

    def unlink(self, blobs: Collection[Path]) -> None:
        """Deletes blobs with all of their names. Raises OSError."""
        for link in (self.folder / "snapshots").rglob("*"):
            if link.is_symlink() and link.resolve() in blobs:
                link.unlink()
        for blob in blobs:
            blob.unlink()

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
        parts = part_paths(snapshot / name.file)
        return snapshot / name.file if all(part.is_file() for part in parts) else None
    if is_whole_folder(snapshot):
        return snapshot
    files = single_files(snapshot)
    if len(files) > 1:
        sizes = {str(f.relative_to(snapshot)): num_bytes(f) for f in files}
        raise several(name, sizes)
    return files[0] if files else None


def is_whole_folder(snapshot: Path) -> bool:
    """Whether a snapshot has ``config.json`` and all files of its weights."""
    if not (snapshot / CONFIG).is_file():
        return False
    if not any((snapshot / name).is_file() for form in FORMS for name in form):
        return False
    return all(file.is_file() for file in weight_files(snapshot))


def single_files(snapshot: Path) -> list[Path]:
    """The models of a snapshot that are one file, and the first parts of those that are split."""
    files = (p for p in snapshot.rglob("*") if p.name.endswith(FILE_SUFFIXES))
    return sorted(
        file
        for file in files
        if is_first_part(file.name) and all(part.is_file() for part in part_paths(file))
    )


def num_bytes(file: Path) -> int:
    """The size of a file with all its parts."""
    return sum(part.stat().st_size for part in part_paths(file))
