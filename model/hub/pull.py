"""A model of the hub on this machine's disk: found there, or downloaded.

Files lie in the cache of the hub's library, which other programs share; the library writes it.

The beginnings of weights are read before the rest, so a model that cannot be served costs little.
A file of safetensors begins with a list of its tensors; a GGUF file with that, its settings and
its tokenizer. What is read goes into an empty file of the right size, and the readers of models
take it: none of them looks at the numbers. Files of torch have their list at the end, and are
checked when they are there.

The hub is asked by the public API of its library, whose settings hold: ``HF_ENDPOINT``,
``HF_TOKEN``, ``HF_HUB_OFFLINE`` and the others. Every failure becomes a `CheckpointError` of one
line. Digests are compared here: the library's downloads compare sizes alone, and its
`HfApi.verify_repo_checksums` reads all models of a repository that are on disk.
"""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from model import foreign
from model.architectures import config_from_dict
from model.chat import read_chat_template
from model.checkpoint_files import GGUF_SUFFIX, ST_SUFFIX, read_weights, weight_files
from model.files import ConfigError
from model.hub.listing import HubFile, Listing, choose, size_text
from model.hub.names import COMMIT, HubName, is_safe_path
from model.hub.on_disk import local, snapshot_of
from model.tokenization.gguf import read_gguf_codec
from model.tokenizer import FILES as TOKENIZER_FILES
from model.tokenizer import Tokenizer, TokenizerError
from model.weights import WEIGHTS, CheckpointError, check_weights

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

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


#: In front of a safetensors header is its length; the bound on it is that of the library.
LENGTH_BYTES, MAX_HEADER_BYTES = 8, 100_000_000
#: Of a GGUF file, whose beginning has no stated length: nearly always enough, and always.
GGUF_BYTES = (4 << 20, 64 << 20)
#: How much to read of a file, by its suffix; 0 is a safetensors header.
SIZES = {Path(WEIGHTS).suffix: (0,), ST_SUFFIX: (0,), GGUF_SUFFIX: GGUF_BYTES}


def check_beginnings(
    listing: Listing, small: Sequence[Path], weights: Sequence[HubFile], is_folder: bool
) -> None:
    """Raises `CheckpointError` for a model that cannot be served; ``small`` are on disk."""
    with tempfile.TemporaryDirectory(prefix="everstream-") as name:
        room = Path(name)
        for file in small:
            (room / file.name).symlink_to(file.resolve())
        if is_folder:
            with _named(listing, room):
                _check_small(room)
        sizes = SIZES.get(PurePosixPath(weights[0].path).suffix, ())
        for size in sizes:
            for part in weights:
                _begin(listing, part, size, room)
            try:
                with _named(listing, room):
                    _check(room, weights[0], is_folder)
                return
            except CheckpointError:
                if size == sizes[-1] or all(part.num_bytes <= size for part in weights):
                    raise


@contextmanager
def _named(listing: Listing, room: Path) -> Iterator[None]:
    """Errors of files in ``room`` become those of the repository."""
    try:
        yield
    except (CheckpointError, ConfigError, TokenizerError) as error:
        message = str(error).replace(f"{room}/", "")
        raise CheckpointError(f"{listing.name}: {message}") from error


def _begin(listing: Listing, file: HubFile, size: int, room: Path) -> None:
    """Puts a file with the beginning of ``file`` into ``room``: ``size`` bytes, 0 for a header."""
    path = room / PurePosixPath(file.path).name
    path.unlink(missing_ok=True)
    if (whole := cached(listing, file)) is not None:
        path.symlink_to(whole.resolve())
        return
    with opened(listing, file) as stream:
        data = stream.read(size or LENGTH_BYTES)
        if not size:
            data += stream.read(min(int.from_bytes(data, "little"), MAX_HEADER_BYTES))
    with path.open("wb") as out:
        out.write(data)
        out.truncate(file.num_bytes)


def _check_small(folder: Path) -> None:
    """Raises what loading would for a config, a tokenizer and a chat template."""
    values = foreign.read_config(folder)
    if not foreign.is_foreign(values.get("model_type")):
        config_from_dict(values)
    _tokenizer(folder)
    read_chat_template(folder)


def _check(room: Path, first: HubFile, is_folder: bool) -> None:
    """Raises what loading would, but for the numbers."""
    path = room / PurePosixPath(first.path).name
    if is_folder:
        _check_folder(room)
    elif path.suffix == GGUF_SUFFIX:
        from model.weights.gguf_file import GgufFile

        file = GgufFile(path)
        config, _ = foreign.read_gguf(file, path.name)
        read_gguf_codec(file.metadata, file.arrays, config.vocab_size)
    else:
        from model.families.rwkv7.read import open_native, read_native

        read_native(open_native(path), path.name)


def _tokenizer(folder: Path) -> Tokenizer:
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not files:
        raise CheckpointError(f"there is no {' or '.join(TOKENIZER_FILES)}")
    return Tokenizer.load(files[0])


def _check_folder(folder: Path) -> None:
    values = foreign.read_config(folder)
    if not foreign.is_foreign(values.get("model_type")):
        check_weights(config_from_dict(values), read_weights(folder))
    elif foreign.needs_no_numbers(values["model_type"]):
        tokenizer, weights = _tokenizer(folder), read_weights(folder)
        foreign.read(values, weights, tokenizer.vocab_size, tokenizer.eos_token_id)


#: Characters of the hub's own words in a message.
MAX_SAID = 200
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
#: A digest of this length is SHA-256 of the content; git's has 40.
_SHA256_CHARS = 64
_BLOCK = 1 << 20
#: Headers that the library makes paths in the cache of, without a check.
_NAMING = ("ETag", "X-Linked-Etag", "X-Repo-Commit")


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
    if info.sha is None or not re.fullmatch(COMMIT, info.sha):
        raise CheckpointError(f"{name}: the hub names no commit")
    files = [_file(each) for each in info.siblings or []]
    return Listing(name, info.sha, {file.path: file for file in files if file is not None})


def cached(listing: Listing, file: HubFile) -> Path | None:
    """Where the file is on disk, if it is."""
    from huggingface_hub import try_to_load_from_cache

    repository = listing.name.repository
    found = try_to_load_from_cache(repository, file.path, revision=listing.commit)
    return Path(found) if isinstance(found, str) else None


def download(listing: Listing, file: HubFile) -> Path:
    """Where the file is, downloaded if it is not on disk; its digest is that which the hub states.

    A connection that breaks is tried again from where it broke. A damaged file is deleted.
    Raises `CheckpointError`.
    """
    from huggingface_hub import hf_hub_download

    repository = listing.name.repository
    with _failures_as_lines(listing.name, file.path):
        path = Path(hf_hub_download(repository, file.path, revision=listing.commit))
    if (found := _digest(path, file)) != file.digest:
        content = path.resolve()
        path.unlink()
        content.unlink(missing_ok=True)
        raise CheckpointError(
            f"{repository}: {file.path} was damaged on the way:"
            f" its digest is {found}, the hub states {file.digest}"
        )
    return path


def link_unchanged(listing: Listing, file: HubFile) -> None:
    """Gives a file that an earlier commit has its place in this one, if it is the same there.

    Nothing is downloaded. Raises `CheckpointError`.
    """
    from huggingface_hub import hf_hub_download

    repository = listing.name.repository
    with _failures_as_lines(listing.name, file.path):
        if hf_hub_download(repository, file.path, revision=listing.commit, dry_run=True).is_cached:
            hf_hub_download(repository, file.path, revision=listing.commit)


def record_revision(name: HubName) -> None:
    """Records on disk which commit the revision is. Raises `CheckpointError`."""
    from huggingface_hub import HfApi

    with _failures_as_lines(name):
        HfApi().resolve_revision(name.repository, revision=name.revision)


@contextmanager
def opened(listing: Listing, file: HubFile) -> Iterator[BinaryIO]:
    """The file, to be read from its first byte on. What is not read is not downloaded.

    Raises `CheckpointError`, also for what fails in the block.
    """
    from huggingface_hub import HfFileSystem

    path = f"{listing.name.repository}/{file.path}"
    with _failures_as_lines(listing.name, file.path):
        stream = HfFileSystem().open(path, revision=listing.commit, block_size=0)
        with cast(BinaryIO, stream):
            yield cast(BinaryIO, stream)


def _file(sibling: RepoSibling) -> HubFile | None:
    """None for a file that cannot be stored under the name or the digest that the hub gives it."""
    digest = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
    if sibling.size is None or digest is None or not _DIGEST.fullmatch(digest):
        return None
    if not is_safe_path(sibling.rfilename):
        return None
    return HubFile(sibling.rfilename, sibling.size, digest)


def _digest(path: Path, file: HubFile) -> str:
    """In hex: SHA-256, or what git calls a blob's id."""
    if len(file.digest) == _SHA256_CHARS:
        digest = hashlib.sha256()
    else:
        header = f"blob {path.stat().st_size}\0".encode()
        digest = hashlib.sha1(header, usedforsecurity=False)
    with path.open("rb") as content:
        while block := content.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _failures_as_lines(name: HubName, path: str | None = None) -> Iterator[None]:
    what = f"{name}" if path is None else f"{name.repository}: {path}"
    try:
        _guard_session()
        yield
    except Exception as error:  # of an HTTP library, and which one depends on the hub's version
        reason = _reason(error, name)
        raise CheckpointError(f"{what} is not available from the hub: {reason}") from error


def _guard_session() -> None:
    """Has each answer checked by `_refuse_paths`, once."""
    from huggingface_hub import get_session

    session = get_session()
    hooks = session.event_hooks
    if _refuse_paths not in hooks["response"]:
        session.event_hooks = {**hooks, "response": [*hooks["response"], _refuse_paths]}


def _refuse_paths(response: Any) -> None:
    for header in _NAMING:
        value = response.headers.get(header, "").removeprefix("W/")
        if "/" in value or "\\" in value or ".." in value:
            raise ValueError(f"its {header} is {value!r:.80}")


def _reason(error: Exception, name: HubName) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the library looked at the disk
    match error:
        case errors.GatedRepoError():
            return "it is gated: accept its conditions on its page, and give a token in HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return "there is no such repository, or it is private and needs a token in HF_TOKEN"
        case errors.RevisionNotFoundError():
            return f"it has no revision {name.revision!r}"
        case errors.OfflineModeIsEnabled():
            return "it is not on disk, and HF_HUB_OFFLINE is set"
        case errors.HfHubHTTPError():
            said = error.response.headers.get("X-Error-Message", "")[:MAX_SAID]
            said = f": {said}" if said.isprintable() and said else ""
            return f"the hub answered {error.response.status_code}{said}"
    return next(iter(str(error).splitlines()), "") or type(error).__name__
