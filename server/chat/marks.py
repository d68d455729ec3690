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

from model.tokenizer import Names, Tokenizer
from server.errors import InvalidRequest

#: Characters that Unicode will never give a meaning to: the private use area.
_CANDIDATES = range(0xE000, 0xF900)
#: How JSON in ASCII writes a character.
_ESCAPED = re.compile(r"\\u([0-9a-f]{4})", re.IGNORECASE)


class Marks:
    """The mark for ``texts``, all that is about to be rendered, and for special ``names``.

    ``end`` is another character that occurs nowhere else. Making it, and each method, takes time
    in proportion to the texts: long ones belong in a thread.
    """

    def __init__(self, names: Iterable[str], *texts: object) -> None:
        text = json.dumps(texts, ensure_ascii=False)
        used = set(map(ord, set(text))) | {int(code[1], 16) for code in _ESCAPED.finditer(text)}
        free = [code for code in _CANDIDATES if code not in used][:2]
        if len(free) < 2:
            raise InvalidRequest("the texts hold every character of the private use area")
        self._mark, self.end = map(chr, free)
        self._escaped = f"\\u{free[0]:04x}"
        # A name of one character has no inside; no tokenizer is known to have one.
        self._names = [name for name in names if len(name) > 1]
        self._longest = max(map(len, self._names), default=0)
        self._whole = Names(self._names)
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
        before, core, after = parted(text)
        if not core:
            return text
        places = self._places(core)
        for size in range(1, min(len(core), self._longest) + 1):
            if core[-size:] in self._heads:
                places.add(len(core) - size + 1)
            if core[:size] in self._tails:
                places.add(size - 1)
        if len(core) <= self._longest and any(core in name[1:-1] for name in self._names):
            places.add(1)
        return before + self._put(core, places) + after

    def without(self, text: str) -> str:
        """``text`` as the client wrote it."""
        for mark in (self._mark, self._escaped, self.end):
            text = text.replace(mark, "")
        return text

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
        return {place + 1 for place, _ in self._whole.places(text)}

    def _put(self, text: str, places: set[int]) -> str:
        """``text`` with the mark at ``places``."""
        cuts = [0, *sorted(places), len(text)]
        return self._mark.join(text[start:end] for start, end in pairwise(cuts))


def parted(text: str) -> tuple[str, str, str]:
    """The spaces that ``text`` begins with, the rest, and the spaces that it ends with."""
    begun, core = text.lstrip(), text.strip()
    start = len(text) - len(begun)
    return text[:start], core, text[start + len(core) :]
