"""What a repository has, and which of its files a model needs.

Weights have one of two forms. A folder has ``config.json`` or ``params.json``, and safetensors or
else torch's own files, in one file or in several with an index. A single file (``FILE_SUFFIXES``)
holds the whole network. A repository that is such a folder is taken as one; of the files and
folders in others the user chooses one, if there are several.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from model import chat as chat_template
from model.checkpoint_files import CONFIG, CONFIGS, FILE_SUFFIXES, GGUF_SUFFIX
from model.hub.names import HubName
from model.tokenization.base import GENERATION_CONFIG
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


@dataclass(frozen=True)
class Choice:
    """What to download: first the small files, then the weights.

    ``weights`` is empty for several files of a folder: the index names them.
    """

    small: tuple[HubFile, ...]
    weights: tuple[HubFile, ...]
    is_folder: bool


def choose(listing: Listing) -> Choice:
    """The files that `Listing.name` needs.

    Raises `CheckpointError` where there are none, and where the user has to choose.
    """
    models = models_in(listing.files)
    sizes = {path: file.num_bytes for path, file in listing.files.items()}
    model = only_model(listing.name, models, sizes)
    if model is None:
        raise CheckpointError(
            f"{listing.name} has no model that can be loaded: neither {CONFIG} with {WEIGHTS}"
            f" (or its index) nor a file {' or '.join(FILE_SUFFIXES)}"
        )
    is_folder = model in models and model not in listing.files
    return _folder(listing, model) if is_folder else _single_file(listing, model)


def models_in(paths: Collection[str]) -> list[str]:
    """The models among files: folders, of which "" is the repository, then single files.

    A file that is split is named by its first part.
    """
    there = set(paths)
    parents = sorted({_parent(path) for path in there if PurePosixPath(path).name in CONFIGS})
    names = [name for form in FORMS for name in form]
    folders = [each for each in parents if any(_join(each, name) in there for name in names)]
    files = [path for path in sorted(there) if path.endswith(FILE_SUFFIXES) and is_first_part(path)]
    return folders + [path for path in files if there.issuperset(part_names(path))]


def only_model(name: HubName, models: Sequence[str], sizes: Mapping[str, int]) -> str | None:
    """The model that ``name`` says, else the repository, else the one that it has, if any.

    ``sizes`` are those of all files, in bytes. Raises `SeveralModels`.
    """
    if name.file is not None:
        return name.file
    if "" in models or len(models) < 2:
        return models[0] if models else None
    lines = [
        f"\n  {HubName(name.repository, name.revision, model)}  {size_text(_size(model, sizes))}"
        for model in models[:MAX_LISTED]
    ]
    more = f"\n  and {len(models) - MAX_LISTED} more" if len(models) > MAX_LISTED else ""
    raise SeveralModels(f"{name} has {len(models)} models; name one of them:{''.join(lines)}{more}")


class SeveralModels(CheckpointError):
    """Asks for one of several models, each on a line of its own; their names are printable."""

    def __init__(self, message: str) -> None:
        ValueError.__init__(self, message)


def size_text(num_bytes: int) -> str:
    """A size as the hub writes it, in decimal units: ``382 MB``."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _size(model: str, sizes: Mapping[str, int]) -> int:
    if model in sizes:
        return sum(sizes[part] for part in part_names(model))
    return sum(size for path, size in sizes.items() if path.startswith(f"{model}/"))


def _folder(listing: Listing, folder: str) -> Choice:
    files, small = listing.files, _companions(listing, folder)
    for one, index in FORMS:
        if (weights := files.get(_join(folder, one))) is not None:
            return Choice(small, (weights,), is_folder=True)
        if (named := files.get(_join(folder, index))) is not None:
            return Choice((*small, named), (), is_folder=True)
    raise AssertionError(folder)


def _single_file(listing: Listing, path: str) -> Choice:
    if not path.endswith(FILE_SUFFIXES):
        raise CheckpointError(
            f"{listing.name}: a model in a repository is a file {' or '.join(FILE_SUFFIXES)}, or a"
            f" folder with {CONFIG} and weights"
        )
    for part in part_names(path):
        if part not in listing.files:
            raise CheckpointError(f"{listing.name.repository} has no file {part!r}")
    weights = tuple(listing.files[part] for part in part_names(path))
    # A GGUF has its tokenizer inside.
    small = () if path.endswith(GGUF_SUFFIX) else _companions(listing, _parent(path))
    return Choice(small, weights, is_folder=False)


def _companions(listing: Listing, folder: str) -> tuple[HubFile, ...]:
    paths = [_join(folder, name) for name in dict.fromkeys(COMPANIONS)]
    return tuple(listing.files[path] for path in paths if path in listing.files)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
