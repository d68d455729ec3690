"""What came before where a grammar allowed the same tokens, which often comes again.

A mask stands for a place in a grammar: the end of a number, a choice of words, any character of
a string. In a list of records the number ends with the same token each time, though no two numbers
are alike, and what follows a word in one field follows it in the next.
"""

from __future__ import annotations

from server.engine.runner import Mask

#: Tokens that are remembered of one text, of each kind; then it begins again.
MAX_CHOICES = 512

#: How often the last token of a place is taken to come again before that was seen, and the part
#: that one more token has in it.
FIRST_RATE, LEARNING_RATE = 0.2, 1 / 4


def place_of(mask: Mask) -> int:
    """Of all places that allow the same tokens."""
    return hash(mask.tobytes())


class Choices:
    """The last tokens of places, and after which tokens they came."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # by places
        self._rates: dict[int, float] = {}  # by places
        self._after: dict[int, int] = {}  # by the token before

    def last(self, place: int) -> int | None:
        """What came there last."""
        return self._last.get(place)

    def rate(self, place: int) -> float:
        """How often the same token comes there as the last time."""
        return self._rates.get(place, FIRST_RATE)

    def after(self, before: int) -> int | None:
        """What came the last time after the token ``before``."""
        return self._after.get(before)

    def learn(self, place: int, before: int, token: int) -> None:
        """``token`` came there after ``before``."""
        if max(len(self._last), len(self._after)) > MAX_CHOICES:
            for known in (self._last, self._rates, self._after):
                known.clear()
        if place in self._last:
            rate = self.rate(place)
            self._rates[place] = rate + LEARNING_RATE * ((self._last[place] == token) - rate)
        self._last[place] = self._after[before] = token
