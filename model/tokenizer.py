"""Byte-level BPE over the `tokenizers` library, with special ids and no unknown token.

`tokenizer.json` is the file format of that library, so other tools read it.
Every byte sequence has ids and every id a byte sequence, which `token_bytes`
gives; a streaming detokeniser is built on that and on nothing else.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT,)


class TokenizerError(ValueError):
    """A tokenizer file that this project cannot serve."""


class Tokenizer:
    """Text to ids and back. Immutable."""

    def __init__(self, backend: Backend) -> None:
        end_of_text = backend.token_to_id(END_OF_TEXT)
        if end_of_text is None:
            raise TokenizerError(f"tokenizer.json has no {END_OF_TEXT!r} token")
        # What is special comes from `pieces`: the library would match the names in any text.
        backend.encode_special_tokens = True
        self._backend = backend
        self.eos_token_id: int = end_of_text
        self.vocab_size: int = backend.get_vocab_size()
        added = backend.get_added_tokens_decoder()
        special = {end_of_text: AddedToken(END_OF_TEXT, special=True)}
        special |= {id: token for id, token in added.items() if token.special}
        self.special_ids: dict[str, int] = {token.content: id for id, token in special.items()}
        self._special = frozenset(special)
        self._names = _pattern(special.values())
        self._bytes = _token_bytes(backend)
        for id in self._special:
            self._bytes[id] = b""

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads ``tokenizer.json``; raises `TokenizerError` where it is not a byte-level BPE."""
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a bad file
            raise TokenizerError(f"{path}: {error}") from error
        return cls(backend)

    def save(self, path: Path) -> None:
        self._backend.save(str(path), pretty=False)

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the ids, in hex."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of ``text``. A special token's name in it is plain text unless allowed."""
        if not allow_special:
            return self._encode_plain(text)
        ids: list[int] = []
        for piece in self.pieces(text):
            ids += [piece] if isinstance(piece, int) else self._encode_plain(piece)
        return ids

    def pieces(self, text: str) -> Iterator[str | int]:
        """``text`` in its order: the ids of the special tokens named in it, and what is between."""
        start = 0
        for match in self._names.finditer(text):
            if match.start() > start:
                yield text[start : match.start()]
            yield self.special_ids[match[str(match.lastgroup)]]
            start = match.end()
        if start < len(text):
            yield text[start:]

    def _encode_plain(self, text: str) -> list[int]:
        # The batch form lets go of the GIL, so that a long text stalls no other thread.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``, without special tokens; broken UTF-8 becomes U+FFFD."""
        return b"".join(self.token_bytes(id) for id in ids).decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes that ``id`` stands for; empty for a special token."""
        return self._bytes[id]

    def is_special(self, id: int) -> bool:
        return id in self._special


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
    return Tokenizer(backend)


def _paragraphs(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        with file.open(encoding="utf-8") as lines:
            yield from (line for line in lines if line.strip() != END_OF_TEXT)


def _pattern(special: Iterable[AddedToken]) -> re.Pattern[str]:
    """Finds special tokens' names, the longest first; some take the spaces beside them along."""
    names = sorted(special, key=lambda token: len(token.content), reverse=True)
    sides = {True: r"\s*", False: ""}
    alternatives = (
        f"{sides[token.lstrip]}(?P<n{index}>{re.escape(token.content)}){sides[token.rstrip]}"
        for index, token in enumerate(names)
    )
    return re.compile("|".join(alternatives))


def _token_bytes(backend: Backend) -> list[bytes]:
    """The bytes of every id, from GPT-2's printable stand-ins for bytes."""
    byte_of = {char: byte for byte, char in _byte_characters().items()}
    added = backend.get_added_tokens_decoder()
    table = [b""] * backend.get_vocab_size()
    for token, id in backend.get_vocab().items():
        if id in added:
            table[id] = token.encode("utf-8")
            continue
        try:
            table[id] = bytes(byte_of[char] for char in token)
        except KeyError as error:
            raise TokenizerError(f"token {id} is not byte-level: {token!r}") from error
    return table


def _byte_characters() -> dict[int, str]:
    """GPT-2's map: printable Latin-1 bytes stand for themselves, the rest from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(0x100 + offset) for offset, byte in enumerate(others)})
    return table
