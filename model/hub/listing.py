"""What a repository has, and which of its files a model needs.

Weights have one of two forms. A folder has ``config.json`` or ``params.json``, and safetensors or
else torch's own files, in one file or in several with an index. A single file (``FILE_SUFFIXES``)
holds the whole network. A repository that is such a folder is taken as one; of the files and
folders in others the user chooses one, if there are several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from model.chat import template as chat_template
from model.checkpoint_files import CONFIG, CONFIGS, FILE_SUFFIXES, GGUF_SUFFIX
from model.hub.names import HubName
from model.tokenization.ends import GENERATION_CONFIG
from model.tokenizer import FILES as TOKENIZER_FILES
from model.weights import FORMS, WEIGHTS, CheckpointError
from model.weights.gguf_file import is_first_part, part_names

#: Small files next to the weights.
COMPANIONS = (*CONFIGS, GENERATION_CONFIG, *TOKENIZER_FILES, *chat_template.FILES)
#: Candidates that a message lists.
MAX_LISTED = 50


@dataclass(frozen=True)
class HubFile:
    """A file of a repository; ``digest`` is its SHA-256 in hex, or git's SHA-1 of a small file."""

    path: str
    num_bytes: int
    digest: str


@dataclass(frozen=True)
class Listing:
    """The files of a repository at a commit, by path."""

    name: HubName
    commit: str
    files: Mapping[str, HubFile]

    @property
    def single_files(self) -> list[HubFile]:
        """The models that are one file, and the first parts of those that are split."""
        files = [f for path, f in sorted(self.files.items()) if path.endswith(FILE_SUFFIXES)]
        return [file for file in files if is_first_part(file.path)]

    @property
    def folders(self) -> list[str]:
        """The models that are folders, each with a slash at its end; empty for the repository."""
        paths = [PurePosixPath(path) for path in self.files]
        parents = {path.parent.as_posix() for path in paths if path.name in CONFIGS}
        folders = sorted("" if parent == "." else f"{parent}/" for parent in parents)
        names = [name for form in FORMS for name in form]
        return [folder for folder in folders if any(f"{folder}{n}" in self.files for n in names)]

    def num_bytes_in(self, folder: str) -> int:
        """The size of all files in a folder."""
        return sum(f.num_bytes for path, f in self.files.items() if path.startswith(folder))

    def parts(self, path: str) -> tuple[HubFile, ...]:
        """All parts of a file, which has one where it is not split."""
        for part in part_names(path):
            if part not in self.files:
                raise CheckpointError(f"{self.name.repository} has no file {part!r}")
        return tuple(self.files[part] for part in part_names(path))


@dataclass(frozen=True)
class Choice:
    """What to fetch: first the small files, then the weights.

    ``weights`` is empty for several files: the index names them.
    ``folder``, empty or with a slash at its end, is that of a model which has a config.
    """

    small: tuple[HubFile, ...]
    weights: tuple[HubFile, ...]
    folder: str | None


def choose(listing: Listing) -> Choice:
    """The files that `Listing.name` needs.

    Raises `CheckpointError` where there are none, and where the user has to choose.
    """
    named, folders = listing.name.file, listing.folders
    if named is not None:
        is_folder = f"{named}/" in folders
        return _folder(listing, f"{named}/") if is_folder else _single_file(listing, named)
    if "" in folders:
        return _folder(listing, "")
    paths = [file.path for file in listing.single_files]
    if not paths and not folders:
        raise CheckpointError(
            f"{listing.name} has no model that can be loaded: neither {CONFIG} with {WEIGHTS}"
            f" (or its index) nor a file {' or '.join(FILE_SUFFIXES)}"
        )
    if len(paths) + len(folders) > 1:
        sizes = {path: sum(part.num_bytes for part in listing.parts(path)) for path in paths}
        sizes |= {folder[:-1]: listing.num_bytes_in(folder) for folder in folders}
        raise several(listing.name, sizes)
    return _folder(listing, folders[0]) if folders else _single_file(listing, paths[0])


class SeveralModels(CheckpointError):
    """Asks for one of several models, each on a line of its own; their names are printable."""

    def __init__(self, message: str) -> None:
        ValueError.__init__(self, message)


def several(name: HubName, sizes: Mapping[str, int]) -> SeveralModels:
    """The error that asks for one of several files or folders, with their sizes in bytes."""
    lines = [
        f"\n  {HubName(name.repository, name.revision, path)}  {size_text(num_bytes)}"
        for path, num_bytes in list(sizes.items())[:MAX_LISTED]
    ]
    more = f"\n  and {len(sizes) - MAX_LISTED} more" if len(sizes) > MAX_LISTED else ""
    return SeveralModels(f"{name} has {len(sizes)} models; name one of them:{''.join(lines)}{more}")


def size_text(num_bytes: int) -> str:
    """A size as the hub writes it, in decimal units: ``382 MB``."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _folder(listing: Listing, folder: str) -> Choice:
    files, small = listing.files, _companions(listing, folder)
    for one, index in FORMS:
        if f"{folder}{one}" in files:
            return Choice(small, (files[f"{folder}{one}"],), folder)
        if f"{folder}{index}" in files:
            return Choice((*small, files[f"{folder}{index}"]), (), folder)
    raise AssertionError(folder)


def _single_file(listing: Listing, path: str) -> Choice:
    if not path.endswith(FILE_SUFFIXES):
        raise CheckpointError(
            f"{listing.name}: a model in a repository is a file {' or '.join(FILE_SUFFIXES)}, or a"
            f" folder with {CONFIG} and weights"
        )
    weights = listing.parts(path)
    folder = path[: -len(PurePosixPath(path).name)]
    # A GGUF has its tokenizer inside.
    small = () if path.endswith(GGUF_SUFFIX) else _companions(listing, folder)
    return Choice(small, weights, None)


def _companions(listing: Listing, folder: str) -> tuple[HubFile, ...]:
    """``folder`` is empty or ends with a slash."""
    paths = [f"{folder}{name}" for name in dict.fromkeys(COMPANIONS)]
    return tuple(listing.files[path] for path in paths if path in listing.files)
