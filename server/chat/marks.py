"""Keeps a special token's name in a client's text from becoming that token.

A template writes special tokens by their names, between texts that come from
the client. Where such a text holds a name, a character that occurs nowhere else
is put into the name before the template is rendered, and taken out again when
what is between the template's own tokens is encoded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from model.tokenizer import Tokenizer
from server.errors import InvalidRequest

#: Characters that Unicode will never give a meaning to: the private use area.
_CANDIDATES = range(0xE000, 0xF900)


class Marks:
    """The mark for ``texts``, all that is about to be rendered, and for special ``names``."""

    def __init__(self, names: Iterable[str], *texts: object) -> None:
        text = (json.dumps(texts, ensure_ascii=False) + json.dumps(texts)).lower()
        free = (code for code in _CANDIDATES if chr(code) not in text and _escape(code) not in text)
        if (code := next(free, None)) is None:
            raise InvalidRequest("the texts hold every character of the private use area")
        self._mark, self._escaped = chr(code), _escape(code)
        # A name of one character has no inside; no tokenizer is known to have one.
        self._names = [name for name in names if len(name) > 1]
        self._longest = max(map(len, self._names), default=0)
        self._whole = re.compile(f"(?={'|'.join(map(re.escape, self._names)) or '(?!)'})")
        self._heads = {name[:at] for name in self._names for at in range(1, len(name))}
        self._tails = {name[at:] for name in self._names for at in range(1, len(name))}

    def all_of(self, value: object) -> object:
        """A copy of ``value`` with marks in all its texts, those of keys as well."""
        if isinstance(value, str):
            return self._cut(value)
        if isinstance(value, Mapping):
            return {self._cut(key): self.all_of(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.all_of(item) for item in value]
        return value

    def content(self, text: str) -> str:
        """Words that a template puts between its own: nor may they begin, end or fill a name."""
        core = text.strip()
        if not core:
            return text
        before, _, after = text.partition(core)
        places = self._places(core)
        for size in range(1, min(len(core), self._longest) + 1):
            if core[-size:] in self._heads:
                places.add(len(core) - size + 1)
            if core[:size] in self._tails:
                places.add(size - 1)
        if any(core in name[1:-1] for name in self._names):
            places.add(1)
        return before + self._put(core, places) + after

    def without(self, text: str) -> str:
        """``text`` as the client wrote it."""
        return text.replace(self._mark, "").replace(self._escaped, "")

    def ids(self, rendered: str, tokenizer: Tokenizer) -> list[int]:
        """The tokens of what a template wrote."""
        return tokenizer.encode_pieces(
            piece if isinstance(piece, int) else self.without(piece)
            for piece in tokenizer.pieces(rendered)
        )

    def _cut(self, text: str) -> str:
        return self._put(text, self._places(text))

    def _places(self, text: str) -> set[int]:
        """After the first character of each name, also of those that overlap."""
        return {found.start() + 1 for found in self._whole.finditer(text)}

    def _put(self, text: str, places: set[int]) -> str:
        """``text`` with the mark at ``places``."""
        cuts = [0, *sorted(places), len(text)]
        return self._mark.join(text[start:end] for start, end in pairwise(cuts))


def _escape(code: int) -> str:
    """How JSON in ASCII writes a character."""
    return f"\\u{code:04x}"
