"""A format in llguidance's grammar text, and how a text is brought to its end."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from model.chat import FORMS
from server.constraints import schema as json_schema
from server.constraints import tool_calls
from server.constraints.schema import FormatRefused

# -------------------------------------------------------------------------------------------------
# A model's tokens as llguidance wants them, and how much work it may do for one mask.


# What a client's grammar may cost: a mask takes at most some tens of milliseconds, and a
# matcher some megabytes (docs/use/structured-output.md has what was measured).
LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=5_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)

# llguidance wants a name for a special token, which must not be the bytes of any text.
_SPECIAL = b"<|special %d|>"

#: No letter of UTF-8 has this byte; llguidance marks special tokens with it.
_MARK = 0xFF


class Vocabulary:
    """The tokens of one model. Immutable, so that threads share it.

    ``token_bytes`` has the bytes of every id, b"" for the special ones. ``encode``
    gives the ids of a text as the model is used to them, where a grammar leaves
    no choice about the text, with exactly its bytes; without it they are the longest that fit.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        eos_token_id: int,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.token_bytes = tuple(token_bytes)
        self.eos_token_id = eos_token_id
        self.num_words = (len(self.token_bytes) + 31) // 32
        tokens = _Tokens(self.token_bytes, eos_token_id, encode or self.longest)
        self._ids = {text: id for id, text in reversed(list(enumerate(self.token_bytes))) if text}
        self._max_bytes = max(map(len, self.token_bytes))
        self.backend = LLTokenizer(
            TokenizerWrapper(tokens), n_vocab=len(self.token_bytes), eos_token=eos_token_id
        )
        for id, text in enumerate(self.token_bytes):
            if text and _MARK not in text:
                seen = self.backend.decode_bytes([id])
                assert seen == text, f"token {id} is {text!r} and is read as {seen!r}"

    def matcher(self, grammar: str) -> LLMatcher:
        """At the beginning of ``grammar``; look at ``is_error`` first."""
        return LLMatcher(self.backend, grammar, log_level=0, limits=LIMITS)

    def longest(self, text: str) -> list[int]:
        """The longest tokens that fit ``text``. Raises `ValueError` where some of it is in none."""
        ids: list[int] = []
        data, start = text.encode(), 0
        while start < len(data):
            length = min(self._max_bytes, len(data) - start)
            while data[start : start + length] not in self._ids:
                length -= 1
                if not length:
                    raise ValueError(f"no token begins {data[start:]!r}")
            ids.append(self._ids[data[start : start + length]])
            start += length
        return ids


class _Tokens:
    """What `TokenizerWrapper` asks of a tokenizer."""

    bos_token_id = None

    def __init__(
        self, token_bytes: Sequence[bytes], eos_token_id: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.eos_token_id = eos_token_id
        self.special_token_ids = [id for id, text in enumerate(token_bytes) if not text]
        self.tokens = [text or _SPECIAL % id for id, text in enumerate(token_bytes)]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):  # so says the wrapper's first look
            raise TypeError("takes text")
        return self._encode(text)


# -------------------------------------------------------------------------------------------------
# A search for a short way from a place in a text to an end of it.
#
# llguidance does not say where a place is, only which tokens may come there: the mask.
# So the search goes breadth first with a few places at each distance, and those whose
# masks are equal count as one. The way that it finds is short, not always the shortest.


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


# -------------------------------------------------------------------------------------------------
# Endings: how a text can be brought to its end, and how far off that one token can lead.


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


# -------------------------------------------------------------------------------------------------
# A format in llguidance's grammar text, together with what its endings cost.
#
# The text says all that a matcher needs, in any process and after any restart.


# What a grammar leaves no choice about is drawn token by token like the rest: forced, it
# would be followed to its end at once, and a million characters take a second.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'

_JSON_OBJECT = {"type": "object"}
_JSON_OPTIONS = {"whitespace_flexible": False}

MAX_MESSAGE_CHARS = 300

_NOT_ENDING = (
    "is too large or too deep: no end of its text was found in the time that a request has for it"
)


class Costs(NamedTuple):
    """``ending``: the tokens of a short text; ``jump``: by how many one token lengthens it."""

    ending: tuple[int, ...]
    jump: int


#: The key of the marker that no free text begins with, where an answer may be one.
_MARKER = "marker"


def grammar_text(format: Mapping[str, Any]) -> str:
    """The form in llguidance of a format other than ``text``, unchecked. Raises `FormatRefused`."""
    match format["type"]:
        case "json_object":
            lark = _from_schema(_JSON_OBJECT)
        case "json_schema":
            lark = _from_schema(format["json_schema"]["schema"])
        case "regex":
            lark = _from_regex(format["regex"])
        case "choice":
            lark = _from_regex("|".join(map(_literal, format["choices"])))
        case "grammar":
            lark = _checked_lark(format["grammar"])
        case "tool_calls":
            lark = tool_calls.calls_lark(format)
        case other:
            raise AssertionError(f"no format: {other!r}")
    marker = tool_calls.marker_of(format)
    head = {} if marker is None else {_MARKER: marker}
    return json.dumps({**head, "grammars": [{"lark_grammar": _NO_FORCING + lark}]})


def with_costs(text: str, vocabulary: Vocabulary, functions: Sequence[str] = ()) -> str:
    """``text`` with its costs, after a try. Raises `FormatRefused` where it cannot be followed.

    That names the one of ``functions``, those of `tool_calls`, at whose arguments it was found.
    """
    start = vocabulary.matcher(text)
    if start.is_error():
        raise _refused(start.get_error(), text, functions)
    for warning in start.get_grammar_warnings():
        raise _refused(warning, text, functions)
    start.compute_bitmask()
    if start.is_error():
        raise _refused(start.get_error(), text, functions)
    endings = GrammarEndings(vocabulary)
    ending = endings.shortest(start)
    jump = None if ending is None else endings.survey(start, ending)
    if ending is None or jump is None:
        raise FormatRefused(_NOT_ENDING)
    return json.dumps({"costs": Costs(ending, jump), **json.loads(text)})


def costs_of(grammar: str) -> Costs:
    """What `with_costs` put in."""
    ending, jump = json.loads(grammar)["costs"]
    return Costs(tuple(ending), jump)


def marker_of(grammar: str) -> str | None:
    """What no free text begins with; None where no free text may come."""
    marker: str | None = json.loads(grammar).get(_MARKER)
    return marker


def _from_schema(schema: Mapping[str, Any]) -> str:
    schema = {**json_schema.normal(schema), "x-guidance": _JSON_OPTIONS}
    return f"start: %json {json.dumps(schema)}"


def _from_regex(regex: str) -> str:
    return f"start: /{regex_to_lark(regex, '')}/"


def _literal(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):X}}}" for c in text)


#: What must not hide a directive: strings, regular expressions and comments.
_OPAQUE = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_NOT_IN_LARK = {
    r"%(json|lark|regex|llguidance)\b": "%{} inside a grammar is not supported",
    r"<\s*(\[|\||[A-Za-z_/])": "special tokens, <...>, are not supported",
    r"(?<![\w\"])@(\w+)": "references to other grammars, @{}, are not supported",
    r"\b(temperature|max_tokens|stop|stop_capture|capture)\b\s*[=\],]": "[{}] is not supported",
}


def _checked_lark(grammar: str) -> str:
    bare = _OPAQUE.sub('""', grammar)
    for pattern, reason in _NOT_IN_LARK.items():
        if found := re.search(pattern, bare):
            raise FormatRefused("grammar: " + reason.format(found[1]))
    return grammar


#: Where an error of llguidance's is in the grammar, from 1 on.
_LINE = re.compile(r"at (\d+)\(")
#: What begins the rules of a function's arguments: see `tool_calls`.
_OF_ARGUMENTS = re.compile(r"arguments_(\d+)")


def _refused(message: str, text: str, functions: Sequence[str]) -> FormatRefused:
    """What llguidance says of ``text``, and of which function."""
    plain = _plain(message)
    if functions and (at := _LINE.match(message)):
        lines = json.loads(text)["grammars"][0]["lark_grammar"].split("\n")
        if rule := _OF_ARGUMENTS.match(lines[int(at[1]) - 1]):
            plain = f"{functions[int(rule[1])]}: {plain}"
    return FormatRefused(plain)


_PLACE = re.compile(r"^(at )?\d+\(\d+\): |<non-verbose/>| \d+ \| .*$")


def _plain(message: str) -> str:
    """An error of llguidance's in one line, without the grammar that it shows."""
    if "oneOf constraints" in message:
        return "oneOf: only alternatives of which no two can hold at once are supported; use anyOf"
    if message.startswith("NoExtension"):
        return "no text is allowed"
    lines = message.split("<state>")[0].split("<grammar>")[0].splitlines()
    line = _PLACE.sub("", " ".join(" ".join(lines).split()))
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 3] + "..."
