"""Text to token ids and back, with special ids and exact bytes.

Every byte sequence has ids and every id a byte sequence, which `token_bytes`
gives; a streaming detokeniser is built on that and on nothing else. The kinds of
tokenizer are those of `model.tokenization`.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from model.files import read_file, read_text
from model.tokenization import library, world
from model.tokenization import sentencepiece as spm
from model.tokenization.base import (
    END_OF_TEXT,
    MAX_NODES,
    MAX_TOKEN_BYTES,
    Codec,
    Ends,
    TokenizerError,
    read_ends,
)
from model.tokenization.library import LibraryCodec
from model.tokenization.world import world_tokens

__all__ = [
    "END_OF_TEXT",
    "FILES",
    "Tokenizer",
    "TokenizerError",
    "train_tokenizer",
]

SPECIAL_TOKENS = (END_OF_TEXT,)

#: Names of a tokenizer's file in a checkpoint; the first that is there counts.
FILES = (library.FILE, world.FILE, spm.FILE)

_SPACES = re.compile(r"\s*")


class Tokenizer:
    """Text to ids and back. Immutable.

    ``eos_token_ids`` end a text; ``eos_token_id`` is the main one, which separates texts.
    ``file_name`` is what the file is called in a checkpoint, ``kind`` what people call such
    files. ``puts_space_in_front``: a text that begins has other ids than one that continues.
    ``silent_ids`` have no text. ``special_ids`` may have several names of one id, of which
    ``special_names`` has the usual one.
    """

    def __init__(self, codec: Codec) -> None:
        """Raises `TokenizerError` for more, or longer, tokens than can be served."""
        self.eos_token_ids: tuple[int, ...] = codec.eos_token_ids
        self.eos_token_id: int = codec.eos_token_ids[0]
        self.vocab_size: int = len(codec.token_bytes)
        self.special_names: dict[int, str] = {id: t.content for id, t in codec.special.items()}
        self.special_ids = {name: id for id, name in self.special_names.items()}
        self.special_ids |= codec.aliases
        self.kind: str = codec.kind
        self.file_name = library.FILE if isinstance(codec, LibraryCodec) else world.FILE
        self.puts_space_in_front: bool = codec.puts_space_in_front
        self._codec, self._bytes = codec, codec.token_bytes
        self.silent_ids = frozenset(id for id, data in enumerate(self._bytes) if not data)
        self._names = Names(self.special_ids)
        #: Names that take spaces along: those before them, those behind them.
        self._takes_before = {t.content for t in codec.special.values() if t.lstrip}
        self._takes_behind = {t.content for t in codec.special.values() if t.rstrip}
        # Silent ids have names of their own in that tree.
        num_nodes = sum(map(len, self._bytes)) + 4 * len(self.silent_ids)
        if max(map(len, self._bytes)) > MAX_TOKEN_BYTES or num_nodes > MAX_NODES:
            raise TokenizerError(
                f"a token is longer than {MAX_TOKEN_BYTES:,} bytes, or all have too many"
            )

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads a file of one of `FILES`' kinds, and the configs next to it.

        An RWKV vocabulary has the suffix ``.txt``, and SentencePiece's a name that begins with
        ``tokenizer.model``.

        Raises `TokenizerError` where tokens have no exact bytes, and `ConfigError` where the
        configs name an end of text that the vocabulary does not have.
        """
        ends = read_ends(path.parent)
        try:
            if path.suffix == ".txt":
                return cls(world.read_world(path, ends))
            if path.name.startswith(spm.BEGINNING):
                text, end = spm.read_sentencepiece(read_file(path, library.MAX_FILE_BYTES))
                return cls(LibraryCodec(text, ends if ends.ids else Ends(((end, path.name),))))
            text = read_text(path, library.MAX_FILE_BYTES)
            if (tokens := world_tokens(text)) is not None:
                return cls(world.WorldCodec(tokens.items(), ends))
            return cls(LibraryCodec(text, ends))
        except FileNotFoundError as error:
            raise TokenizerError(f"{path} does not exist") from error
        except OSError as error:
            raise TokenizerError(f"{path}: {error.strerror or error}") from error
        except (TokenizerError, UnicodeError) as error:
            message = str(error)
            named = message if str(path) in message else f"{path}: {message}"
            raise TokenizerError(named) from error

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """The tokenizer of the text of a ``tokenizer.json``. Raises `TokenizerError`."""
        return cls(LibraryCodec(text))

    def remembering(self) -> Tokenizer:
        """The same, with a memory of its own for the ids of long texts."""
        tokenizer = copy.copy(self)
        tokenizer._codec = self._codec.remembering()
        return tokenizer

    def save(self, path: Path) -> None:
        """Writes the tokenizer's file; `file_name` is what checkpoints call it."""
        path.write_text(self.content, encoding="utf-8", newline="\n")

    @property
    def content(self) -> str:
        """The text of the tokenizer's file."""
        return self._codec.content()

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the ids, in hex."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of a text from its beginning, where some kinds put a space in front.

        A special token's name in it is plain text unless allowed.
        """
        if not allow_special:
            return self._codec.encode(text)
        return self.encode_pieces(self.pieces(text))

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        """Ids of a text from its beginning, of which special tokens are given by their ids."""
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                codec = self._codec
                ids += codec.encode_after_special(piece) if ids else codec.encode(piece)
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of what continues a text: no space is put in front."""
        return self._codec.encode_continuation(text)

    def encode_exact(self, text: str) -> list[int]:
        """Ids whose bytes are those of ``text``: nothing put in front, nothing normalised."""
        return self._codec.encode_exact(text)

    def pieces(self, text: str) -> Iterator[str | int]:
        """``text`` in its order: the ids of the special tokens named in it, and what is between."""
        start = 0
        for place, name in self._names.places(text):
            if place < start:
                continue  # within the name before
            before = text[start:place]
            if name in self._takes_before:
                before = before.rstrip()
            if before:
                yield before
            yield self.special_ids[name]
            start = place + len(name)
            if name in self._takes_behind:
                spaces = _SPACES.match(text, start)
                assert spaces is not None, "any text begins with no spaces at least"
                start = spaces.end()
        if start < len(text):
            yield text[start:]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids`` from its beginning, without special tokens.

        Broken UTF-8 becomes U+FFFD.
        """
        parts, begun = [], False
        for id in ids:
            data = self._bytes[id] if begun else self.first_bytes(id)
            begun = begun or bool(self._bytes[id])
            parts.append(data)
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes of ``id``; empty for a special token."""
        return self._bytes[id]

    def first_bytes(self, id: int) -> bytes:
        """The bytes of ``id`` as the first token of a text that has any.

        Without the space that encoding puts in front; else those of `token_bytes`.
        """
        return self._codec.first_bytes.get(id, self._bytes[id])


def train_tokenizer(files: Sequence[Path], vocab_size: int) -> Tokenizer:
    """Learns a byte-level BPE of ``vocab_size`` ids from UTF-8 text files.

    Raises `TokenizerError` where ``vocab_size`` cannot hold the 256 bytes and
    the special tokens.
    """
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise TokenizerError(f"vocab_size must be at least {256 + len(SPECIAL_TOKENS)}")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_paragraphs(files), trainer)
    return Tokenizer.from_json(backend.to_str())


def _paragraphs(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        with file.open(encoding="utf-8") as lines:
            yield from (line for line in lines if line.strip() != END_OF_TEXT)


class Names:
    """Looks for ``names``; one without a character is never found.

    One regular expression of all of them would try each name at each place, within one call that
    keeps the interpreter's lock: minutes for a megabyte of ``<|`` and 500 names. Here the work at a
    place is one look-up for each length that a name with this beginning has.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(filter(None, names))
        #: The first two characters of names -> their lengths, the greatest first.
        self._sizes: dict[str, list[int]] = {}
        for size, head in sorted({(len(name), name[:2]) for name in self._names}, reverse=True):
            self._sizes.setdefault(head, []).append(size)
        firsts = "".join(sorted({re.escape(name[0]) for name in self._names}))
        self._firsts = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def places(self, text: str) -> Iterator[tuple[int, str]]:
        """Where a name begins in ``text``, ascending, and the longest name that begins there.

        Names that overlap are all found.
        """
        for found in self._firsts.finditer(text):
            place = found.start()
            for size in (*self._sizes.get(text[place : place + 2], ()), 1):
                name = text[place : place + size]
                if name in self._names:
                    yield place, name
                    break
