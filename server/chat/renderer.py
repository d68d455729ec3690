"""The server's side of chat templates: marks in clients' texts, and the processes that render."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path

from model.tokenizer import Names, Tokenizer
from server.chat import sandbox
from server.errors import InvalidRequest, invalid
from server.workers.process import ROOT, Turns, WorkerEnded, WorkerProcess

# -------------------------------------------------------------------------------------------------
# Keeps a special token's name in a client's text from becoming that token.
#
# A template writes special tokens by their names, between texts that come from the client. Where
# such a text holds a name, a character that occurs nowhere else is put into the name before the
# template is rendered, and taken out again when what is between the template's own tokens is
# encoded.

#: Characters that Unicode will never give a meaning to: the private use area.
_CANDIDATES = range(0xE000, 0xF900)
#: How JSON in ASCII writes a character.
_ESCAPED = re.compile(r"\\u([0-9a-f]{4})", re.IGNORECASE)


class _SpecialNames:
    """Special names, and what they begin and end with."""

    def __init__(self, names: Iterable[str]) -> None:
        # A name of one character has no inside; no tokenizer is known to have one.
        cut = [name for name in names if len(name) > 1]
        self.longest = max(map(len, cut), default=0)
        self.whole = Names(cut)
        self.heads = {name[:at] for name in cut for at in range(1, len(name))}
        self.tails = {name[at:] for name in cut for at in range(1, len(name))}
        #: What is inside of each, with a character between them that no text is likely to have.
        self.insides = "\0".join(name[1:-1] for name in cut)


@lru_cache(maxsize=16)
def _special_names(names: tuple[str, ...]) -> _SpecialNames:
    """Made once: a tokenizer may have thousands, which are the same in each request."""
    return _SpecialNames(names)


class Marks:
    """The mark for ``texts``, all that is about to be rendered, and for special ``names``.

    ``end`` is another character that occurs nowhere else. Making it, and each method, takes time
    in proportion to the texts: long ones belong in a thread.
    """

    def __init__(self, names: Iterable[str], *texts: object) -> None:
        text = json.dumps(texts, ensure_ascii=False)
        used = set(map(ord, set(text))) | {int(code[1], 16) for code in _ESCAPED.finditer(text)}
        free = list(islice((code for code in _CANDIDATES if code not in used), 2))
        if len(free) < 2:
            raise InvalidRequest("the texts hold every character of the private use area")
        self._mark, self.end = map(chr, free)
        self._escaped = f"\\u{free[0]:04x}"
        self._special = _special_names(tuple(names))

    def all_of(self, value: object) -> object:
        """A copy of ``value`` with marks in all its texts, those of keys as well."""
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self._marked(key): self.all_of(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.all_of(item) for item in value]
        return value

    def content(self, text: str) -> str:
        """Words that a template puts between its own: nor may they begin, end or fill a name."""
        before, core, after = parted(text)
        if not core:
            return text
        special, places = self._special, self._places(core)
        for size in range(1, min(len(core), special.longest) + 1):
            if core[-size:] in special.heads:
                places.add(len(core) - size + 1)
            if core[:size] in special.tails:
                places.add(size - 1)
        if len(core) <= special.longest and core in special.insides:
            places.add(1)
        return before + self._put(core, places) + after

    def without(self, text: str) -> str:
        """``text`` as the client wrote it."""
        for mark in (self._mark, self._escaped, self.end):
            text = text.replace(mark, "")
        return text

    def ids(self, rendered: str, tokenizer: Tokenizer) -> list[int]:
        """The tokens of what a template wrote."""
        return tokenizer.encode_pieces(
            piece if isinstance(piece, int) else self.without(piece)
            for piece in tokenizer.pieces(rendered)
        )

    def _marked(self, text: str) -> str:
        return self._put(text, self._places(text))

    def _places(self, text: str) -> set[int]:
        """After the first character of each name, also of those that overlap."""
        return {place + 1 for place, _ in self._special.whole.places(text)}

    def _put(self, text: str, places: set[int]) -> str:
        """``text`` with the mark at ``places``."""
        cuts = [0, *sorted(places), len(text)]
        return self._mark.join(text[start:end] for start, end in pairwise(cuts))


def parted(text: str) -> tuple[str, str, str]:
    """The spaces that ``text`` begins with, the rest, and the spaces that it ends with."""
    begun, core = text.lstrip(), text.strip()
    start = len(text) - len(begun)
    return text[:start], core, text[start + len(core) :]


# -------------------------------------------------------------------------------------------------
# The processes that render, and their replacement when they die.

TIMEOUT_S = 5.0
MAX_CHARS = 4 << 20
#: Templates that run at the same time. A slow one delays no other one while they are fewer.
NUM_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Rendered:
    """``text`` is what a template writes. ``shared``: see `Renderer.render`."""

    text: str
    shared: Sequence[tuple[int, str]] = ()


class Renderer:
    """Renders chat templates, `NUM_PROCESSES` at a time. Belongs to one event loop; `close` it.

    A process starts when it is needed first. A rendering that takes longer
    than ``timeout_s`` seconds costs its process; the next one gets a new one.
    """

    def __init__(
        self,
        timeout_s: float = TIMEOUT_S,
        max_chars: int = MAX_CHARS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._timeout_s, self._max_chars, self._clock = timeout_s, max_chars, clock
        self._turns = Turns(math.inf, NUM_PROCESSES)
        # Of the environment, which may hold keys, it sees nothing.
        path = dict.fromkeys([*filter(None, sys.path), str(ROOT)])
        command = (sys.executable, "-P", str(Path(sandbox.__file__)))
        env = {"PYTHONPATH": os.pathsep.join(path)}
        self._workers = [WorkerProcess(command, env) for _ in range(NUM_PROCESSES)]
        #: The one that was used last is the next: a second one starts where two are needed.
        self._idle = [*self._workers]

    async def render(
        self,
        source: str,
        variables: Mapping[str, object],
        others: Sequence[Mapping[str, object]] = (),
        owner: str = "",
    ) -> Rendered:
        """What ``source`` makes of ``variables``; raises `InvalidRequest` with what it says.

        ``others`` are rendered as well: ``variables`` with more messages, ``following``, and other
        values of what else they name. ``shared`` has, for those that the template allows, how many
        characters the text begins with in common, and what comes next in theirs. It is empty where
        a template is slow. Owners take turns.
        """
        request = {
            "source": source,
            "variables": variables,
            "others": others,
            "max_chars": self._max_chars,
            "now_s": self._clock(),
            "timeout_s": self._timeout_s,
        }
        async with self._turns.turn(owner):
            worker = self._idle.pop()
            try:
                found = await worker.ask(request)
            except WorkerEnded as ended:
                raise _failed(self._reason(ended.code)) from None
            finally:
                self._idle.append(worker)
        if "error" in found:
            raise _failed(found["error"])
        return Rendered(found["text"], [(place, ahead) for place, ahead in found["shared"]])

    async def close(self) -> None:
        """Ends the processes, after what they render."""
        async with AsyncExitStack() as turns:
            for _ in self._workers:
                await turns.enter_async_context(self._turns.turn(""))
            for worker in self._workers:
                await worker.close()

    def _reason(self, code: int) -> str:
        if code == -signal.SIGALRM:
            return f"it takes longer than {self._timeout_s:g} seconds"
        return f"its process ended with {code}"


def _failed(message: str) -> InvalidRequest:
    return invalid("messages", f"the model's chat template says: {message}")
