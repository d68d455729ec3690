"""Formats to grammars for one model: tried in a child, remembered, and made into matchers.

A matcher is a place in the texts of one grammar, over llguidance: it says which tokens may come.
With few tokens left it closes: only those may come after which there is room for an
end, so that a text that is cut off is one that parses. All of it depends on the
grammar and the tokens alone, so that a matcher made again continues in the same way.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson
from llguidance import LLMatcher

from server.constraints.grammar import (
    Ending,
    GrammarEndings,
    Vocabulary,
    costs_of,
    ids_of,
    marker_of,
    words_of,
)
from server.constraints.schema import FormatRefused, NotTried
from server.constraints.worker import setup_request
from server.engine.session import UNKNOWN_S
from server.errors import InvalidRequest, QueueFull, RequestError, invalid
from server.workers.process import (
    ROOT,
    TooManyWait,
    Turns,
    WorkerEnded,
    WorkerProcess,
    WorkerUnavailable,
)

# -------------------------------------------------------------------------------------------------
# The child process that tries formats, from the side of the event loop.
#
# It is started when the first format comes and stays; one that takes too long, too
# much memory, or dies, is killed, and the next format gets a new one.


logger = logging.getLogger("everstream.constraints")

TOO_SLOW = "took too long to compile"
TOO_LARGE = "takes too much time or memory to compile"

#: Each thread of a library would reserve memory, of which there is a bound.
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What one format may take. ``max_cpu_s`` is rounded up to a whole second.

    ``timeout_s`` is by the clock, for a child that does not even compute.
    """

    max_cpu_s: float = 2.0
    timeout_s: float = 10.0
    max_memory_bytes: int = 512 << 20


class Child:
    """One at a time: the caller keeps the order. `close` it."""

    def __init__(self, vocabulary: Vocabulary, limits: TrialLimits) -> None:
        self._timeout_s = limits.timeout_s
        self._worker = WorkerProcess(
            (sys.executable, "-m", "server.constraints.worker"),
            _ENVIRONMENT,
            ROOT,
            setup_request(vocabulary, limits.max_memory_bytes, limits.max_cpu_s),
        )

    async def grammar(self, format: Mapping[str, Any]) -> str:
        """Its grammar text. Raises `FormatRefused`."""
        try:
            answer = await self._worker.ask(format, self._timeout_s)
        except WorkerUnavailable as error:
            logger.error("the process that checks formats could not be started: %s", error)
            raise NotTried("cannot be compiled at present") from error
        except TimeoutError:
            raise NotTried(TOO_SLOW) from None
        except WorkerEnded:
            raise FormatRefused(TOO_LARGE) from None
        if "refused" in answer:
            raise FormatRefused(answer["refused"])
        return str(answer["grammar"])

    async def close(self) -> None:
        """Ends the process, if there is one."""
        await self._worker.close()


# -------------------------------------------------------------------------------------------------
# The child tries one at a time, of the owners in turn.


PARAM = "response_format"

#: Formats of one tenant that wait to be compiled; tenants take turns.
MAX_WAITING = 16
MAX_VERDICTS = 256
MAX_MATCHERS = 64


class Format(Protocol):
    """What is needed of `server.api.schemas.requests.FormatPart`."""

    def model_dump(self, *, by_alias: bool) -> dict[str, Any]: ...


class GrammarTokenizer(Protocol):
    """What is needed of `model.tokenizer.Tokenizer`."""

    eos_token_id: int
    vocab_size: int

    def token_bytes(self, id: int, /) -> bytes: ...
    def encode_exact(self, text: str, /) -> list[int]: ...


class FormatCompiler:
    """What a model's texts may be held to. `grammar` and `close` are the event loop's.

    `matcher` may be called from any thread; it is the engine's ``matchers``.
    """

    def __init__(self, tokenizer: GrammarTokenizer, limits: TrialLimits | None = None) -> None:
        tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self._vocabulary = Vocabulary(tokens, tokenizer.eos_token_id, tokenizer.encode_exact)
        self._endings = GrammarEndings(self._vocabulary)
        self._free_texts: dict[str, FreeText] = {}
        self._child = Child(self._vocabulary, limits or TrialLimits())
        self._turns, self._closed = Turns(MAX_WAITING), asyncio.Event()
        self._verdicts: OrderedDict[bytes, str | FormatRefused] = OrderedDict()
        self._beginnings: OrderedDict[str, GrammarMatcher] = OrderedDict()
        self._beginnings_lock = threading.Lock()

    async def grammar(self, format: Format | None, owner: str = "") -> str | None:
        """The grammar text of ``format``, which ``owner`` asks for; None where any text will do.

        Raises `InvalidRequest` where it is refused, `QueueFull` where too many of the owner's wait.
        """
        if format is None:
            return None
        # In a thread: the functions of tools may have a megabyte of schemas.
        wanted, key = await asyncio.to_thread(_keyed, format)
        if wanted["type"] == "text":
            return None
        verdict = self._verdicts.get(key) or await self._tried(key, wanted, owner)
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        if isinstance(verdict, FormatRefused):
            raise invalid(PARAM, str(verdict))
        if verdict not in self._beginnings:
            # Built here beforehand, the engine's thread only copies it.
            await asyncio.to_thread(self._beginning, verdict)
        return verdict

    def matcher(self, grammar: str) -> GrammarMatcher:
        """At the beginning of a text. Raises `InvalidRequest` for one not made by `grammar`."""
        return self._beginning(grammar).copy()

    async def close(self) -> None:
        """Ends the child; a format that is in it, and those that wait, are refused."""
        self._closed.set()
        await self._child.close()

    async def _tried(
        self, key: bytes, wanted: Mapping[str, Any], owner: str
    ) -> str | FormatRefused:
        """The verdict, remembered: what is refused today is refused tomorrow."""
        try:
            async with self._turns.turn(owner):
                verdict = self._verdicts.get(key) or await self._verdict(wanted)
        except TooManyWait:
            raise QueueFull("too many formats wait to be compiled", PARAM) from None
        if not isinstance(verdict, NotTried):
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    async def _verdict(self, wanted: Mapping[str, Any]) -> str | FormatRefused:
        if self._closed.is_set():
            return NotTried("is not compiled while the server stops")
        try:
            return await self._child.grammar(wanted)
        except FormatRefused as refusal:
            return NotTried(str(refusal)) if self._closed.is_set() else refusal

    def _beginning(self, grammar: str) -> GrammarMatcher:
        """A matcher that stays at the beginning; those used last are kept."""
        with self._beginnings_lock:
            found = self._beginnings.get(grammar)
            if found is None:
                found = self._beginnings[grammar] = self._made(grammar)
            self._beginnings.move_to_end(grammar)
            if len(self._beginnings) > MAX_MATCHERS:
                self._beginnings.popitem(last=False)
            return found

    def _made(self, grammar: str) -> GrammarMatcher:
        try:
            (ending, jump), marker = costs_of(grammar), marker_of(grammar)
        except (ValueError, KeyError, TypeError):
            raise InvalidRequest(f"{PARAM}: the grammar is not of this server", PARAM) from None
        place = self._vocabulary.matcher(grammar)
        free = None if marker is None else self._free_text(marker)
        return GrammarMatcher(self._vocabulary, self._endings, place, ending, jump, free_text=free)

    def _free_text(self, marker: str) -> FreeText:
        """One for all grammars: each would go through the whole vocabulary by itself."""
        if marker not in self._free_texts:
            self._free_texts[marker] = FreeText(self._vocabulary, marker)
        return self._free_texts[marker]


def _keyed(format: Format) -> tuple[dict[str, Any], bytes]:
    """What decides the grammar of ``format``, and a digest of it."""
    wanted = format.model_dump(by_alias=True)
    if wanted["type"] == "json_schema":
        wanted["json_schema"] = {"schema": wanted["json_schema"]["schema"]}
    return wanted, hashlib.sha256(orjson.dumps(wanted)).digest()


# -------------------------------------------------------------------------------------------------
# Which tokens may come next in a text, and how a text ends that has few tokens left.


class FreeText:
    """Answers that may be any text unless they begin with a marker, as a call of a tool does.

    Once a text differs from the marker no grammar holds for it any more: it needs no closing
    when the tokens run out, and is cut like any other text. For one vocabulary and one marker;
    for one thread.
    """

    def __init__(self, vocabulary: Vocabulary, marker: str) -> None:
        self._tokens, self._marker = vocabulary.token_bytes, marker.encode()
        self._num_words = vocabulary.num_words
        #: By what a text has begun with, which is part of the marker.
        self._leaving: dict[bytes, npt.NDArray[np.uint32]] = {}

    def begun(self, before: bytes, token: int) -> bytes:
        """The beginning of the text after ``token``, as far as it has to be known."""
        return (before + self._tokens[token])[: len(self._marker)]

    def is_free(self, begun: bytes) -> bool:
        """Whether a text that begins so cannot become the marker."""
        return not self._marker.startswith(begun)

    def leaving(self, begun: bytes) -> npt.NDArray[np.uint32]:
        """The tokens after which the text is free: bit ``i % 32`` of word ``i // 32``.

        Looked for once: to go through a large vocabulary takes some tens of milliseconds.
        """
        found = self._leaving.get(begun)
        if found is None:
            found = self._leaving[begun] = self._found(begun)
        return found

    def _found(self, begun: bytes) -> npt.NDArray[np.uint32]:
        bits = np.zeros(self._num_words * 32, bool)
        bits[: len(self._tokens)] = [
            bool(text) and self.is_free((begun + text)[: len(self._marker)])
            for text in self._tokens
        ]
        words = np.packbits(bits, bitorder="little").view(np.uint32)
        words.setflags(write=False)
        return words


#: Of the tokens that may come while a text is being closed, the first few are looked at:
#: the commonest ones, in a vocabulary of merged pairs.
MAX_LOOKED_AT = 256

#: Where no end was found, the next look is that many tokens later.
RETRY_TOKENS = 64

#: Tokens of which a text remembers the end that was found after them, which takes a search.
MAX_FOUND = 32


class NotAllowed(RequestError):
    """A token that the grammar has no place for."""

    code = "internal_error"


class GrammarMatcher:
    """Implements `server.engine.session.Matcher`. For one thread.

    ``free_text`` says where any text may come, which is not closed.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        endings: GrammarEndings,
        place: LLMatcher,
        ending: Ending | None,
        jump: int,
        num_tokens: int = 0,
        free_text: FreeText | None = None,
        begun: bytes = b"",
        found: Mapping[int, Ending] | None = None,
    ) -> None:
        self._vocabulary, self._endings = vocabulary, endings
        self._place, self._ending = place, ending
        self._jump, self._num_tokens = jump, num_tokens
        self._free_text, self._begun = free_text, begun
        self._found = dict(found or {})  # the last end after each token
        #: Seconds that the last token took: its mask, and to continue by it.
        self.cost_s = UNKNOWN_S

    def allowed(self, budget: int | None = None) -> npt.NDArray[np.uint32]:
        """See `_mask`; measured."""
        begin_s = time.perf_counter()
        mask = self._mask(budget)
        self.cost_s = time.perf_counter() - begin_s
        return mask

    def accept(self, token: int) -> None:
        """Continues by ``token``. Raises `NotAllowed`, and is of no more use then."""
        begin_s = time.perf_counter()
        self._advance(token)
        self.cost_s += time.perf_counter() - begin_s

    def _mask(self, budget: int | None) -> npt.NDArray[np.uint32]:
        """Bit ``i % 32`` of word ``i // 32``: token ``i`` may come, and ``budget`` tokens in all.

        Raises `InvalidRequest` where the grammar has become too much work.
        """
        self._check()
        mask = words_of(self._place.compute_bitmask(), self._vocabulary.num_words).copy()
        self._check()
        ending = self._ending
        if budget is None or self._is_free or not ending or len(ending) + self._jump < budget:
            return mask
        closing = self._closing(mask, ending, budget)
        if self._free_text is not None:
            closing |= mask & self._free_text.leaving(self._begun)
        return closing

    def _advance(self, token: int) -> None:
        self._check()
        if not self._place.consume_token(token):
            if "doesn't satisfy" in self._place.get_error():
                raise NotAllowed(f"token {token} is not allowed by the grammar")
            self._check()
        self._num_tokens += 1
        if self._free_text is not None:
            self._begun = self._free_text.begun(self._begun, token)
        if token == self._vocabulary.eos_token_id:
            self._ending = ()
        elif self._is_free:
            self._ending = None
        elif self._ending is not None or self._num_tokens % RETRY_TOKENS == 0:
            before = self._ending or ()
            self._ending = self._ending_after(token, before)
            if self._ending is not None:
                self._jump = max(self._jump, len(self._ending) - len(before))

    def _ending_after(self, token: int, before: Ending) -> Ending | None:
        """Found without a search where it is that which followed ``token`` the last time.

        In a list each record ends with the same token, and from there on the end is the same.
        """
        found = self._found.get(token, ())
        if len(found) > len(before) + self._jump:
            found = ()
        ending = self._endings.after(token, before, self._place, found)
        if ending is not None and len(ending) > len(before):
            if len(self._found) == MAX_FOUND:
                self._found.clear()
            self._found[token] = ending
        return ending

    def is_over(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._place.is_stopped() and not self._place.is_error()

    def copy(self) -> GrammarMatcher:
        """Another one at this place, that continues by itself."""
        other = GrammarMatcher(
            self._vocabulary,
            self._endings,
            self._place.deep_copy(),
            self._ending,
            self._jump,
            self._num_tokens,
            self._free_text,
            self._begun,
            self._found,
        )
        other.cost_s = self.cost_s
        return other

    @property
    def _is_free(self) -> bool:
        return self._free_text is not None and self._free_text.is_free(self._begun)

    def _closing(
        self, mask: npt.NDArray[np.uint32], ending: Ending, budget: int
    ) -> npt.NDArray[np.uint32]:
        """The tokens of ``mask`` that leave room for an end; that of ``ending`` is always one."""
        kept = [ending[0]]
        if len(ending) < budget:
            some = ids_of(mask)[:MAX_LOOKED_AT]
            kept += self._endings.keeping(ending, self._place, map(int, some))
        narrow = np.zeros_like(mask)
        for token in kept:
            narrow[token // 32] |= np.uint32(1 << token % 32)
        return narrow

    def _check(self) -> None:
        if self._place.is_error():
            raise InvalidRequest(
                "response_format: the grammar became too much work in this text",
                "response_format",
            )
