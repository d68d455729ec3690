"""What a kind of tokenizer gives to `model.tokenizer.Tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from tokenizers import AddedToken

from model.files import FileError

END_OF_TEXT = "<|endoftext|>"

#: The longest tokens that are published have some hundred bytes. Grammars are matched on a tree of
#: all tokens, which can have so many levels and nodes.
MAX_TOKEN_BYTES, MAX_NODES = 1024, (1 << 22) - 64


class TokenizerError(FileError):
    """A tokenizer file that this project cannot serve."""


class Codec(Protocol):
    """One tokenizer file. Immutable, so that threads share it."""

    @property
    def kind(self) -> str:
        """What people call files of this kind."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes of each id; b"" for ids without text."""

    @property
    def first_bytes(self) -> Mapping[int, bytes]:
        """The bytes of ids that have others where they are the first of a text."""

    @property
    def special(self) -> Mapping[int, AddedToken]:
        """Tokens that no plain text has, by id; most have no text of their own.

        Those that end a text are among them.
        """

    @property
    def aliases(self) -> Mapping[str, int]:
        """Other names of such tokens, which templates use."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text; the first one, which is special, is the main one."""

    @property
    def puts_space_in_front(self) -> bool:
        """Whether a text that begins is encoded with a space in front of it."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text that begins a text, as the file says."""

    def encode_after_special(self, text: str) -> list[int]:
        """The same behind a special token."""

    def encode_continuation(self, text: str) -> list[int]:
        """The same with nothing put in front."""

    def encode_exact(self, text: str) -> list[int]:
        """Ids whose bytes are those of ``text``: nothing put in front, nothing normalised."""

    def remembering(self) -> Self:
        """A copy that remembers the ids of long texts: see `model.tokenization.known`."""

    def content(self) -> str:
        """The file."""
