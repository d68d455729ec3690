"""A search for a short way from a place in a text to an end of it.

llguidance does not say where a place is, only which tokens may come there: the mask.
So the search goes breadth first with a few places at each distance, and those whose
masks are equal count as one. The way that it finds is short, not always the shortest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from llguidance import LLMatcher

MAX_WIDTH = 6
MAX_STRUCTURE = 64

_Key = tuple[bytes, int]


class Reached(NamedTuple):
    """A place of a search: the tokens to it, what may come, how many brackets they opened."""

    place: LLMatcher
    way: tuple[int, ...]
    mask: bytes
    depth: int

    @property
    def key(self) -> _Key:
        return self.mask, self.depth


class Search:
    """One search. ``tokens_of`` gives tokens to try under a mask, ``depth_of`` a token's brackets.

    ``rest_of`` gives the rest of the way where it is known. ``ends`` are tokens that are tried
    together: those that end a text of any tokens.
    """

    def __init__(
        self,
        tokens_of: Callable[[bytes], list[int]],
        depth_of: Callable[[int], int],
        rest_of: Callable[[LLMatcher], tuple[int, ...] | None],
        ends: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self._tokens_of, self._depth_of, self._rest_of = tokens_of, depth_of, rest_of
        self._ends = ends
        self._useful: dict[bytes, list[int]] = {}
        self.spent = 0

    def run(self, start: LLMatcher, fuel: int, max_tokens: int) -> tuple[int, ...] | None:
        """The way from ``start``; None where ``fuel``, tokens to try, did not suffice."""
        level = [Reached(start, (), mask_of(start), 0)]
        met = {level[0].key}
        for _ in range(max_tokens):
            reached: dict[_Key, Reached] = {}
            families: list[list[Reached]] = []
            for here in level:
                around = self._around(here)
                for there in around:
                    if (rest := self._rest_of(there.place)) is not None:
                        return (*there.way, *rest)
                families.append([there for there in around if there.key not in reached])
                reached |= {there.key: there for there in families[-1]}
            level = _best(families, met)
            met |= reached.keys()
            if not level or self.spent >= fuel:
                break
        return None

    def _around(self, here: Reached) -> list[Reached]:
        """Where the tokens lead that are worth a try, those alike once."""
        if not has_structure(here.mask):
            for end in self._ends:
                self.spent += 1
                there = self._after(here, end)
                if there is not None and has_structure(there.mask):
                    return [there]
        tokens = self._useful.get(here.mask) or self._tokens_of(here.mask)
        self.spent += len(tokens)
        found: dict[_Key, Reached] = {}
        for token in tokens:
            there = self._after(here, (token,))
            if there is None:
                continue
            if there.place.is_accepting():
                return [there]
            if not there.place.is_error():
                found.setdefault(there.key, there)
        self._useful.setdefault(here.mask, [there.way[-1] for there in found.values()])
        return list(found.values())

    def _after(self, here: Reached, tokens: tuple[int, ...]) -> Reached | None:
        """Where ``tokens`` lead, if they may come."""
        place = here.place.deep_copy()
        if not place.consume_tokens(list(tokens)):
            return None
        mask = mask_of(place)
        in_string = mask == here.mask and not has_structure(mask)
        depth = here.depth + (0 if in_string else sum(map(self._depth_of, tokens)))
        return Reached(place, (*here.way, *tokens), mask, depth)


def has_structure(mask: bytes) -> bool:
    """Whether so few tokens may come that it is not within a free text."""
    return int.from_bytes(mask).bit_count() < MAX_STRUCTURE


def mask_of(place: LLMatcher) -> bytes:
    """What may come, as llguidance gives it."""
    return b"" if place.is_stopped() else place.compute_bitmask()


def _best(families: list[list[Reached]], met: set[_Key]) -> list[Reached]:
    """The first of each family, then the least deep, then the newest, then others.

    One family can go in circles and have many members all the while.
    """
    families = [sorted(family, key=lambda there: there.key in met) for family in families]
    in_turn = [there for turn in zip_longest(*families) for there in turn if there is not None]
    chosen = dict.fromkeys(there.key for there in in_turn[: MAX_WIDTH // 2])
    by_depth = sorted(in_turn, key=lambda there: there.depth)
    chosen |= dict.fromkeys(there.key for there in by_depth[: MAX_WIDTH // 2])
    newest = sorted(in_turn, key=lambda there: there.key in met)
    chosen |= dict.fromkeys(there.key for there in newest)
    found = {there.key: there for there in in_turn}
    return [found[key] for key in [*chosen][:MAX_WIDTH]]
