"""What a repository has, and which of its files a model needs.

Weights have one of two forms. A folder has ``config.json`` and safetensors, or else torch's own
files, in one file or in several with an index. A single file (``FILE_SUFFIXES``) holds the whole
network. A folder is preferred; of several single files the user chooses one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from model import chat_template
from model.checkpoint_files import CONFIG, FILE_SUFFIXES, GGUF_SUFFIX
from model.hub.names import HubName
from model.split_files import is_first_part, part_names
from model.tokenization.ends import GENERATION_CONFIG
from model.tokenizer import FILES as TOKENIZER_FILES
from model.weights import FORMS, WEIGHTS, CheckpointError

#: Small files next to the weights.
COMPANIONS = (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES, *chat_template.FILES)
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
    ``is_folder`` where a ``config.json`` is part of the model.
    """

    small: tuple[HubFile, ...]
    weights: tuple[HubFile, ...]
    is_folder: bool


def choose(listing: Listing) -> Choice:
    """The files that `Listing.name` needs.

    Raises `CheckpointError` where there are none, and where the user has to choose.
    """
    if listing.name.file is not None:
        return _single_file(listing, listing.name.file)
    files = listing.files
    for one, index in FORMS if CONFIG in files else ():
        if one in files:
            return Choice(_companions(listing, ""), (files[one],), True)
        if index in files:
            return Choice((*_companions(listing, ""), files[index]), (), True)
    candidates = listing.single_files
    if not candidates:
        raise CheckpointError(
            f"{listing.name} has no model that can be loaded: neither {CONFIG} with {WEIGHTS}"
            f" (or its index) nor a file {' or '.join(FILE_SUFFIXES)}"
        )
    if len(candidates) > 1:
        sizes = {f.path: sum(p.num_bytes for p in listing.parts(f.path)) for f in candidates}
        raise several(listing.name, sizes)
    return _single_file(listing, candidates[0].path)


class SeveralModels(CheckpointError):
    """Asks for one of several models, each on a line of its own; their names are printable."""

    def __init__(self, message: str) -> None:
        ValueError.__init__(self, message)


def several(name: HubName, sizes: Mapping[str, int]) -> SeveralModels:
    """The error that asks for one of several files, with their sizes in bytes."""
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


def _single_file(listing: Listing, path: str) -> Choice:
    if not path.endswith(FILE_SUFFIXES):
        raise CheckpointError(
            f"{listing.name}: a single file is {' or '.join(FILE_SUFFIXES)};"
            " safetensors are found without naming a file"
        )
    weights = listing.parts(path)
    folder = path[: -len(PurePosixPath(path).name)]
    # A GGUF has its tokenizer inside.
    small = () if path.endswith(GGUF_SUFFIX) else _companions(listing, folder)
    return Choice(small, weights, False)


def _companions(listing: Listing, folder: str) -> tuple[HubFile, ...]:
    """``folder`` is empty or ends with a slash."""
    paths = [f"{folder}{name}" for name in dict.fromkeys(COMPANIONS)]
    return tuple(listing.files[path] for path in paths if path in listing.files)
