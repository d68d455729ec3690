"""Ids of texts that were encoded before, for clients that send a text again with more behind it.

An encoder tells how much of a text is *settled*: what its first ids are, whatever follows. A text
that begins with the settled part of a known one takes the ids of that part, and the rest alone is
encoded; so the ids are those of the whole text, always. `KnownTexts` needs no more than that.
"""

from __future__ import annotations

import sys
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

#: Shorter texts are encoded sooner than found.
MIN_CHARS = 256
#: Of texts and ids that one `KnownTexts` keeps.
MAX_BYTES = 1 << 23
#: Places at which a known text may go another way, as in the fork of a conversation.
MAX_CUTS = 64


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
        if len(text) < MIN_CHARS:
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
            self._remember(_Known(text, array("I", ids), cuts[-MAX_CUTS:]))
        return ids

    def _longest(self, text: str) -> tuple[_Known | None, int]:
        """The known text that ``text`` shares most with, and how many of its cuts."""
        best, best_cuts, most = None, 0, 0
        for other in self._alike.get(text[:MIN_CHARS], ()):
            known = self._texts[other]
            num_cuts = known.num_cuts_of(text)
            if num_cuts and known.cuts[num_cuts - 1][0] > most:
                best, best_cuts, most = known, num_cuts, known.cuts[num_cuts - 1][0]
        return best, best_cuts

    def _remember(self, known: _Known) -> None:
        self._forget(known.text)
        self._texts[known.text] = known
        self._alike.setdefault(known.text[:MIN_CHARS], set()).add(known.text)
        self._num_bytes += known.num_bytes
        while self._num_bytes > MAX_BYTES:
            self._forget(next(iter(self._texts)))

    def _forget(self, text: str) -> None:
        known = self._texts.pop(text, None)
        if known is None:
            return
        self._num_bytes -= known.num_bytes
        alike = self._alike[text[:MIN_CHARS]]
        alike.discard(text)
        if not alike:
            del self._alike[text[:MIN_CHARS]]
