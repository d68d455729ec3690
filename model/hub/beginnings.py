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
from model.hub.listing import HubFile, Listing
from model.hub.remote import cached, opened
from model.tokenization.gguf import read_gguf_codec
from model.tokenizer import FILES as TOKENIZER_FILES
from model.tokenizer import Tokenizer, TokenizerError
from model.weights import WEIGHTS, CheckpointError, check_weights
from model.weights.folder import read_weights

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
