"""Endings: how a text can be brought to its end, and how far off that one token can lead."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from model.chat.call_forms import FORMS
from server.constraints.search import Search, has_structure, mask_of
from server.constraints.vocabulary import Vocabulary

Ending = tuple[int, ...]

#: Tokens tried: in the first search, in that after a token, and in a survey. Some 20 us each.
FIRST_FUEL = 20_000
NEXT_FUEL = 2_000
SURVEY_FUEL = 6_000

#: Of a survey: tokens looked at for a new place, and new places before it starts again;
#: how often it continues by the known ending instead.
NUM_TRIED = 4
#: Of a step in a plain text, whose masks take ten times as long as those in JSON: all of them lead
#: to few places.
TEXT_FUEL = 120
MAX_STEPS = 32
TOWARDS_THE_END = 0.7

MAX_ENDING = 2_048

#: So many tokens of a known ending may have become needless by one that was drawn.
NUM_SKIPPED = 24

NUM_CLOSING, NUM_LONG, NUM_SIGNS, NUM_SHORT = 12, 6, 32, 64
CLOSING = frozenset(b'"]})')
MARKS = frozenset((b",", b":", b"[", b"{", b'{"', b',"'))
SIGNS = frozenset(b" !#$%&'(*+,-./:;<=>?@[\\^_`{|~0\n")


class GrammarEndings:
    """Finds them for one vocabulary. Immutable.

    An ending's last token is that of the end of text where the text could continue there.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._eos, self._num_words = vocabulary.eos_token_id, vocabulary.num_words
        tokens = vocabulary.token_bytes
        self._closing = np.array([bool(text) and set(text) <= CLOSING for text in tokens])
        self._quotes = np.array([text.startswith(b'"') for text in tokens])
        self._marks = np.array([text in MARKS for text in tokens])
        self._depths = [_depth(text) for text in tokens]
        self._lengths = np.array([len(text) for text in tokens])
        # In a text that these end, any token may come until all but their last letter has.
        ends = [form.parameter.end for form in FORMS.values() if form.parameter is not None]
        self._ends: list[Ending] = []
        with suppress(ValueError):  # a vocabulary without these characters has no such calls
            self._ends = [tuple(vocabulary.longest(end)) for end in ends]
        sign = np.array([len(text) == 1 and text[0] in SIGNS for text in tokens])
        self._kinds = np.select([self._closing, sign, self._lengths == 1], [0, 1, 2], 3)

    def shortest(self, start: LLMatcher) -> Ending | None:
        """From ``start``, which stays as it is; None if none was found."""
        return self._search(start, (), FIRST_FUEL)[0]

    def after(
        self, token: int, before: Ending, place: LLMatcher, likely: Ending = ()
    ) -> Ending | None:
        """From ``place``, which ``token`` led to; ``before`` was that of the place before it.

        One that is ``likely`` is taken where it is longer than that, and is one.
        """
        if before and token == before[0]:
            return before[1:]
        if len(likely) > len(before) and not place.is_error():
            found = self._checked(place, self._without_eos(likely))
            if found is not None:
                return found
        return self._search(place, before, NEXT_FUEL)[0]

    def keeping(self, ending: Ending, place: LLMatcher, tokens: Iterable[int]) -> list[int]:
        """Those of ``tokens`` after which ``ending`` from ``place`` still is one."""
        whole = [*self._without_eos(ending), self._eos]
        return [
            token for token in tokens if place.validate_tokens([token, *whole]) == len(whole) + 1
        ]

    def survey(self, start: LLMatcher, first: Ending) -> int | None:
        """The most tokens that one token was seen to add to the ending, which is ``first`` here.

        Walks about from ``start``, always in the same way. None: from some place no end was found.
        """
        draw, seen = random.Random(0), set[bytes]()
        place, ending, steps = start, first, 0
        fuel, most = SURVEY_FUEL, 1
        while fuel > 0:
            in_text = any(ending[: len(end)] == end for end in self._ends)
            fuel -= TEXT_FUEL if in_text else NUM_TRIED
            # Mostly towards the end: what may come once more comes there.
            token = ending[0] if ending and draw.random() < TOWARDS_THE_END else self._eos
            if token != self._eos:
                place = place.deep_copy()
                place.consume_token(token)
                ending = ending[1:]
                continue
            step = self._new(place, draw, seen) if steps < MAX_STEPS else None
            if step is None:
                place, ending, steps = start, first, 0
                continue
            token, place = step
            found, spent = self._search(place, ending, FIRST_FUEL)
            fuel -= spent
            if found is None or spent > NEXT_FUEL:
                return None
            most = max(most, len(found) - len(ending))
            ending, steps = found, steps + 1
        return most

    def _new(
        self, place: LLMatcher, draw: random.Random, seen: set[bytes]
    ) -> tuple[int, LLMatcher] | None:
        """A token and where it leads: to a mask not ``seen`` yet, if a few trials find one."""
        if place.is_stopped():
            return None
        candidates = self._candidates(place.compute_bitmask())
        step = None
        for token in draw.sample(candidates, min(NUM_TRIED, len(candidates))):
            there = place.deep_copy()
            there.consume_token(token)
            step = token, there
            mask = mask_of(there)
            if mask not in seen:
                seen.add(mask)
                break
        return step

    def _search(self, place: LLMatcher, known: Ending, fuel: int) -> tuple[Ending | None, int]:
        """The ending, and the fuel that it took. A part of ``known`` may be its rest."""
        if place.is_error():
            return None, 1
        known = self._without_eos(known)
        if (rest := self._rest(place, known)) is not None:
            return rest, 1
        spent = 0
        for tokens_of, share in ((self._closers, fuel // 4), (self._candidates, fuel)):
            depth_of = self._depths.__getitem__
            rest_of = partial(self._rest, known=known)
            search = Search(tokens_of, depth_of, rest_of, self._ends)
            way = search.run(place, share, MAX_ENDING)
            spent += search.spent
            if way is not None:
                return way, spent
        return None, spent

    def _end(self, place: LLMatcher) -> Ending:
        return () if place.is_stopped() else (self._eos,)

    def _rest(self, place: LLMatcher, known: Ending) -> Ending | None:
        """The shortest part of ``known`` that is an ending from here, of its longest ones."""
        if place.is_accepting():
            return self._end(place)
        for start in reversed(range(min(NUM_SKIPPED, len(known)))):
            found = self._checked(place, known[start:])
            if found is not None:
                return found
        return None

    def _checked(self, place: LLMatcher, way: Ending) -> Ending | None:
        """The ending that ``way`` is from ``place``, if it leads to an end."""
        if place.validate_tokens([*way, self._eos]) != len(way) + 1:
            return None
        there = place.deep_copy()
        there.consume_tokens(list(way))
        return (*way, *self._end(there))

    def _without_eos(self, ending: Ending) -> Ending:
        return ending[:-1] if ending and ending[-1] == self._eos else ending

    def _closers(self, mask: bytes) -> list[int]:
        """Only quotes and brackets that close, where they do; else like `_candidates`."""
        ids = ids_of(words_of(mask, self._num_words))
        closing = ids[self._closing[ids]]
        # In a text without a quote to end it, brackets are letters like others.
        if closing.size and (self._quotes[closing].any() or has_structure(mask)):
            marks = ids[self._marks[ids]]
            return [*_some(closing, NUM_CLOSING), *_some(marks, NUM_CLOSING)]
        return self._candidates(mask)

    def _candidates(self, mask: bytes) -> list[int]:
        """A few of the tokens that may come: what closes something, long ones, signs and others."""
        ids = ids_of(words_of(mask, self._num_words))
        ids = ids[ids != self._eos]
        kinds = self._kinds[ids]
        rest = ids[kinds == 3]
        longest = rest[np.argsort(-self._lengths[rest], kind="stable")[:NUM_LONG]]
        return [
            *_some(ids[kinds == 0], NUM_CLOSING),
            *_some(longest, NUM_LONG),
            *_some(ids[kinds == 1], NUM_SIGNS),
            *_some(ids[kinds == 2], NUM_SHORT),
        ]


def _depth(text: bytes) -> int:
    """By how many more brackets it opens than it closes, in whatever language."""
    opened, closed = (b"(", b"[", b"{", b"<"), (b")", b"]", b"}", b">")
    return sum(map(text.count, opened)) - sum(map(text.count, closed))


def words_of(mask: bytes, num_words: int) -> npt.NDArray[np.uint32]:
    """Bit ``i % 32`` of word ``i // 32`` is that of token ``i``."""
    return np.frombuffer(mask, "<u4")[:num_words]


def ids_of(mask: npt.NDArray[np.uint32]) -> npt.NDArray[np.intp]:
    """The tokens whose bits are set, in order."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def _some(ids: Sequence[np.intp] | npt.NDArray[np.intp], number: int) -> list[int]:
    """At most ``number`` of them, evenly."""
    return [int(id) for id in ids[:: -(-len(ids) // number) or 1]]
