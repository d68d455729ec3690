"""Formats to grammars for one model: tried in a child, remembered, and made into matchers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from server.constraints.grammar import GrammarEndings, Vocabulary, costs_of, marker_of
from server.constraints.matcher import FreeText, GrammarMatcher
from server.constraints.schema import FormatRefused, NotTried
from server.constraints.worker import setup_request
from server.errors import InvalidRequest, QueueFull, invalid
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
