"""Formats to grammars for one model: tried in a child, remembered, and made into matchers.

The child tries one at a time, of the owners in turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from server.constraints.child import Child, TrialLimits
from server.constraints.ending import GrammarEndings
from server.constraints.errors import FormatRefused, NotTried
from server.constraints.grammar import costs_of, marker_of
from server.constraints.matcher import FreeText, GrammarMatcher
from server.constraints.vocabulary import Vocabulary
from server.errors import InvalidRequest, QueueFull, invalid
from server.workers.turns import TooManyWait, Turns

PARAM = "response_format"

#: Formats of one tenant that wait to be compiled; tenants take turns.
MAX_WAITING = 16
MAX_VERDICTS = 256
MAX_MATCHERS = 64


class Format(Protocol):
    """What is needed of `server.api.schemas.formats.FormatPart`."""

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
