"""What a kind of tokenizer gives to `model.tokenizer.Tokenizer`, and what the kinds share.

**Ends.** Which tokens end a text is what the files next to a tokenizer say: the ids in
``config.json`` and ``generation_config.json`` (``eos_token_id``, one or a list) and the name in
``tokenizer_config.json`` (``eos_token``) all count, since chat models often end a turn with one
token and a document with another.

**Known texts.** Ids of texts that were encoded before are kept for clients that send a text again
with more behind it. An encoder tells how much of a text is *settled*: what its first ids are,
whatever follows. A text that begins with the settled part of a known one takes the ids of that
part, and the rest alone is encoded; so the ids are those of the whole text, always. `KnownTexts`
needs no more than that.
"""

from __future__ import annotations

import os
import sys
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from tokenizers import AddedToken

from model.files import ConfigError, FileError, read_json

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
        """A copy that remembers the ids of long texts: see `model.tokenization.base`."""

    def content(self) -> str:
        """The file."""


GENERATION_CONFIG = "generation_config.json"
#: Files that hold ``eos_token_id``; the first id of the first one is the main end of text.
ID_FILES = ("config.json", GENERATION_CONFIG)
NAME_FILE = "tokenizer_config.json"


@dataclass(frozen=True)
class Ends:
    """Values of ``eos_token_id`` and of ``eos_token``, each with the file that has it."""

    ids: tuple[tuple[Any, str], ...] = ()
    names: tuple[tuple[Any, str], ...] = ()


NO_ENDS = Ends()


def read_ends(folder: Path) -> Ends:
    """What the files in ``folder`` say. Raises `ConfigError` where one is not a JSON object."""
    ids = [(_value(folder / name, "eos_token_id"), name) for name in ID_FILES]
    eos_token = _value(folder / NAME_FILE, "eos_token")
    if isinstance(eos_token, dict):
        eos_token = eos_token.get("content")
    names = [(eos_token, NAME_FILE)]
    return Ends(*(tuple(pair for pair in pairs if pair[0] is not None) for pairs in (ids, names)))


def resolve_ends(ends: Ends, vocab_size: int, id_of: Callable[[str], int | None]) -> list[int]:
    """The ids of ``ends`` in a vocabulary, without repetition.

    Raises `ConfigError` for an id or a name that the vocabulary does not have.
    """
    found: dict[int, None] = {}
    for value, file in ends.ids:
        ids = value if isinstance(value, list) and value else [value]
        if not all(type(id) is int and 0 <= id < vocab_size for id in ids):
            raise ConfigError(
                f"{file}: eos_token_id must be in 0..{vocab_size - 1}, or a list, not {value!r}"
            )
        found.update(dict.fromkeys(ids))
    for name, file in ends.names:
        id = id_of(name) if isinstance(name, str) else None
        if id is None:
            raise ConfigError(f"{file}: eos_token {name!r} is not in the tokenizer's vocabulary")
        found[id] = None
    return list(found)


def _value(path: Path, field: str) -> Any:
    """That of the file, or of its text model where a model has several."""
    if not os.path.lexists(path):
        return None
    values = read_json(path)
    text = values.get("text_config")
    value = values.get(field)
    return text.get(field) if value is None and isinstance(text, dict) else value


#: Shorter texts are encoded sooner than found.
MIN_KNOWN_CHARS = 256
#: Of texts and ids that one `KnownTexts` keeps.
MAX_KNOWN_BYTES = 1 << 23
#: Places at which a known text may go another way, as in the fork of a conversation.
MAX_KNOWN_CUTS = 64


class Encoded(NamedTuple):
    """Ids of a text. The first ``settled_chars`` characters are the first ``settled_ids`` ids."""

    ids: list[int]
    settled_chars: int = 0
    settled_ids: int = 0


class _Known(NamedTuple):
    """A text and its ids. ``cuts``: characters and ids up to where it was settled, ascending."""

    text: str
    ids: array[int]
    cuts: list[tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        return sys.getsizeof(self.text) + self.ids.itemsize * len(self.ids)

    def num_cuts_of(self, text: str) -> int:
        """Up to how many of the cuts ``text`` is this one."""
        return bisect_left(
            self.cuts, True, key=lambda cut: not text.startswith(self.text[: cut[0]])
        )


class KnownTexts:
    """An encoder that remembers. Threads may share it.

    ``plain`` encodes short texts, ``settled`` long ones and what follows a settled part.
    """

    def __init__(
        self, plain: Callable[[str], list[int]], settled: Callable[[str], Encoded]
    ) -> None:
        self._plain, self._settled = plain, settled
        self._lock = threading.Lock()
        #: The one that was used last comes last.
        self._texts = OrderedDict[str, _Known]()
        #: The same by their first characters.
        self._alike = dict[str, set[str]]()
        self._num_bytes = 0

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""
        if len(text) < MIN_KNOWN_CHARS:
            return self._plain(text)
        with self._lock:
            if (known := self._texts.get(text)) is not None:
                self._texts.move_to_end(text)
                return known.ids.tolist()
            former, num_cuts = self._longest(text)
        cuts = former.cuts[:num_cuts] if former else []
        num_chars, num_ids = cuts[-1] if cuts else (0, 0)
        encoded = self._settled(text[num_chars:])
        ids = [*former.ids[:num_ids], *encoded.ids] if former else encoded.ids
        if encoded.settled_ids:
            cuts.append((num_chars + encoded.settled_chars, num_ids + encoded.settled_ids))
        with self._lock:
            if former and num_cuts == len(former.cuts):  # all that is settled of it is in this one
                self._forget(former.text)
            self._remember(_Known(text, array("I", ids), cuts[-MAX_KNOWN_CUTS:]))
        return ids

    def _longest(self, text: str) -> tuple[_Known | None, int]:
        """The known text that ``text`` shares most with, and how many of its cuts."""
        best, best_cuts, most = None, 0, 0
        for other in self._alike.get(text[:MIN_KNOWN_CHARS], ()):
            known = self._texts[other]
            num_cuts = known.num_cuts_of(text)
            if num_cuts and known.cuts[num_cuts - 1][0] > most:
                best, best_cuts, most = known, num_cuts, known.cuts[num_cuts - 1][0]
        return best, best_cuts

    def _remember(self, known: _Known) -> None:
        self._forget(known.text)
        self._texts[known.text] = known
        self._alike.setdefault(known.text[:MIN_KNOWN_CHARS], set()).add(known.text)
        self._num_bytes += known.num_bytes
        while self._num_bytes > MAX_KNOWN_BYTES:
            self._forget(next(iter(self._texts)))

    def _forget(self, text: str) -> None:
        known = self._texts.pop(text, None)
        if known is None:
            return
        self._num_bytes -= known.num_bytes
        alike = self._alike[text[:MIN_KNOWN_CHARS]]
        alike.discard(text)
        if not alike:
            del self._alike[text[:MIN_KNOWN_CHARS]]
