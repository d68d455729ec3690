"""Finds the names of special tokens in a text that may have been made to be searched slowly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


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
