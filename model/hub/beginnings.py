"""The beginnings of weights, read before the rest: a model that cannot be served costs little.

A file of safetensors begins with a list of its tensors; a GGUF file with that, its settings and
its tokenizer. What is read goes into an empty file of the right size, and the readers of models
take it: none of them looks at the numbers. Files of torch have their list at the end, and are
checked when they are there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from model import foreign
from model.architectures import config_from_dict
from model.chat.template import read_chat_template
from model.checkpoint_files import GGUF_SUFFIX, ST_SUFFIX
from model.files import ConfigError
from model.hub.cache import Repository
from model.hub.fetch import is_fetched
from model.hub.listing import Choice, HubFile, Listing
from model.hub.remote import read_range
from model.tokenization.gguf import read_gguf_codec
from model.tokenizer import FILES as TOKENIZER_FILES
from model.tokenizer import Tokenizer, TokenizerError
from model.weights import WEIGHTS, CheckpointError, check_weights
from model.weights.folder import read_weights

#: In front of a safetensors header is its length; the bound on it is that of the library.
LENGTH_BYTES, MAX_HEADER_BYTES = 8, 100_000_000
#: Of a GGUF file, whose beginning has no stated length: nearly always enough, and always.
GGUF_BYTES = (4 << 20, 64 << 20)
SAFETENSORS = (Path(WEIGHTS).suffix, ST_SUFFIX)


def check_beginnings(
    listing: Listing, place: Repository, choice: Choice, weights: Sequence[HubFile]
) -> None:
    """Raises `CheckpointError` for a model that cannot be served; ``choice.small`` are on disk."""
    suffix = PurePosixPath(weights[0].path).suffix
    with tempfile.TemporaryDirectory(prefix="everstream-") as name:
        room = Path(name)
        for file in choice.small:
            source = place.snapshot(listing.commit) / file.path
            (room / source.name).symlink_to(source.resolve())
        sizes: tuple[int, ...] = (
            (0,) if suffix in SAFETENSORS else GGUF_BYTES if suffix == GGUF_SUFFIX else ()
        )
        is_folder = choice.folder is not None
        if is_folder:
            with _named(listing, room):
                _tokenizer(room)
                read_chat_template(room)
        for size in sizes:
            for file in weights:
                _begin(listing, place, file, size, room)
            try:
                with _named(listing, room):
                    _check(room, weights[0], is_folder)
                return
            except CheckpointError:
                if size == sizes[-1] or all(file.num_bytes <= size for file in weights):
                    raise


@contextmanager
def _named(listing: Listing, room: Path) -> Iterator[None]:
    """Errors of files in ``room`` become those of the repository."""
    try:
        yield
    except (CheckpointError, ConfigError, TokenizerError) as error:
        message = str(error).replace(f"{room}/", "")
        raise CheckpointError(f"{listing.name}: {message}") from error


def _begin(listing: Listing, place: Repository, file: HubFile, size: int, room: Path) -> None:
    """Puts a file with the beginning of ``file`` into ``room``: ``size`` bytes, 0 for a header."""
    path = room / PurePosixPath(file.path).name
    path.unlink(missing_ok=True)
    if is_fetched(place, file):
        path.symlink_to((place.blobs / file.digest).resolve())  # the cache's may be relative
        return
    end = min(size or LENGTH_BYTES, file.num_bytes)
    data = read_range(listing, file, 0, end)
    if not size:
        end += min(int.from_bytes(data, "little"), MAX_HEADER_BYTES)
        end = min(end, file.num_bytes)
        data += read_range(listing, file, len(data), end)
    with path.open("wb") as out:
        out.write(data)
        out.truncate(file.num_bytes)


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
        config = config_from_dict(values)
        check_weights(config, read_weights(folder))
    elif foreign.needs_no_numbers(values["model_type"]):
        tokenizer, weights = _tokenizer(folder), read_weights(folder)
        foreign.read(values, weights, tokenizer.vocab_size, tokenizer.eos_token_id)
