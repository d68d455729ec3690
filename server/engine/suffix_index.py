"""The end of a text, found again further back in it: what followed there may follow here.

A suffix that occurs twice is the cheapest guess at the next tokens (Saxena 2023, "Prompt lookup
decoding"; Oliaro et al. 2024, "SuffixDecoding"). The last tokens are in a ring. Each place is
chained to the one before it where the last `NGRAM` tokens have the same hash, so that a token takes
constant time to add, and a look-up a bounded one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

#: Tokens that a suffix must have in common with an earlier place.
NGRAM = 3

#: Tokens that are remembered; a power of two.
RING_TOKENS = 8192
_RING = RING_TOKENS - 1
_NUM_HEADS = 2 * RING_TOKENS

#: Earlier places that a look-up compares, and tokens that it compares at each.
MAX_PLACES = 8
MAX_MATCH = 32

#: Places are 32-bit numbers: after so many tokens an index begins again.
_MAX_COUNT = 1 << 30

#: What one index takes, in bytes: the ring, the chains and their heads.
INDEX_BYTES = 4 * (2 * RING_TOKENS + _NUM_HEADS)


class SuffixIndex:
    """The last `RING_TOKENS` tokens of a text; `INDEX_BYTES` of memory, whatever its length."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._ring = array("i", bytes(4 * RING_TOKENS))
        self._before = array("i", bytes(4 * RING_TOKENS))  # the place before with the same hash
        self._heads = array("i", b"\xff" * (4 * _NUM_HEADS))  # the last place of each hash, or -1
        self._count = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds ``tokens``, of which the last `RING_TOKENS` count."""
        if self._count >= _MAX_COUNT:
            self._clear()
        tokens = tokens[-RING_TOKENS:]
        ring, before, heads, count = self._ring, self._before, self._heads, self._count
        second, first = ring[(count - 2) & _RING], ring[(count - 1) & _RING]
        for token in tokens:
            place = count & _RING
            ring[place] = token
            key = ((second * 31 + first) * 8191 + token) % _NUM_HEADS
            before[place], heads[key] = heads[key], count
            second, first = first, token
            count += 1
        self._count = count

    def find(self) -> tuple[int, int]:
        """Where the text has been that its end repeats, and how many tokens are the same.

        Of the nearest places the one with most in common, 0 tokens where there is none. The place
        is that of the token that came next, for `following`.
        """
        ring, last = self._ring, self._count - 1
        oldest = max(self._count - RING_TOKENS, 0)
        found, longest = 0, NGRAM - 1
        if last < NGRAM:
            return 0, 0
        place = self._before[last & _RING]
        for _ in range(MAX_PLACES):
            limit = min(place - oldest + 1, MAX_MATCH)
            if limit < NGRAM:
                break
            length = 0
            while (
                length < limit and ring[(place - length) & _RING] == ring[(last - length) & _RING]
            ):
                length += 1
            if length > longest:
                found, longest = place + 1, length
                if length == MAX_MATCH:
                    break
            place = self._before[place & _RING]
        return (found, longest) if found else (0, 0)

    def following(self, place: int, limit: int) -> list[int]:
        """The next ``limit`` tokens if the text continues as it did from ``place`` on.

        Where that leads to the text's end it continues from ``place`` again.
        """
        ring, period = self._ring, self._count - place
        return [ring[(place + i % period) & _RING] for i in range(limit)]
