"""What the answer to `POST /v1/completions` says of a prompt and of a choice, as JSON.

Lists of log-probabilities are written in blocks as they come, so that an answer takes
no more memory than its JSON, and no block takes long.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.api.openai.logprobs import (
    BLOCK_TOKENS,
    Columns,
    LegacyLogprobs,
    ScoredPrompt,
    TokenNames,
    Top,
    joined,
    prompt_logprobs,
)
from server.engine.types import TokenEvent

#: Pieces of text that are kept before they are joined.
MAX_PIECES = 512


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer has beside the text.

    ``num`` choices of each prompt. ``names`` are needed for ``logprobs`` and
    ``prompt_logprobs``: so many of the most probable tokens, None for none at all.
    ``echo`` has the prompts' texts. ``usage_so_far`` stands in each chunk.
    """

    num: int = 1
    usage: bool = False
    usage_so_far: bool = False
    echo: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    names: TokenNames | None = None

    def echo_of(self, place: int) -> str:
        """The text of the prompt at ``place``, where it is shown."""
        return self.echo[place] if self.echo else ""

    def legacy(self, offset: int = 0, at_start: bool = False) -> LegacyLogprobs:
        """A writer of ``logprobs``, of a text from its start or of what continues it."""
        assert self.names is not None and self.logprobs is not None, self
        return LegacyLogprobs(self.names, self.logprobs, offset, at_start)


@dataclass(frozen=True, slots=True)
class PromptJson:
    """How likely a prompt was, written once for all of its choices; None where not asked for."""

    columns: Columns | None = None
    ranked: orjson.Fragment | None = None

    @property
    def more(self) -> dict[str, Any]:
        """Fields of a choice."""
        return {} if self.ranked is None else {"prompt_logprobs": self.ranked}


def write_prompt(prompt: ScoredPrompt, shown: Shown) -> Generator[bytes, None, PromptJson]:
    """Returns the prompt's JSON, and yields nothing after each block: others have their turn."""
    columns = Columns() if shown.echo and shown.logprobs is not None else None
    legacy = None if columns is None else shown.legacy(at_start=prompt.begins)
    ranked: list[bytes] = []
    for block in prompt.blocks():
        if columns is not None and legacy is not None:
            columns.add(legacy.of(block.items))
        if shown.prompt_logprobs is not None:
            assert shown.names is not None, shown
            entries = prompt_logprobs(block, shown.names, shown.prompt_logprobs)
            ranked.append(orjson.dumps(entries)[1:-1])
        yield b""
    return PromptJson(columns, joined(ranked) if ranked else None)


@dataclass(slots=True)
class Generated:
    """The text of one choice and its log-probabilities, as far as they have come."""

    logprobs: LegacyLogprobs | None
    _texts: list[str] = field(default_factory=list)
    _tokens: list[tuple[int, float | None, Top]] = field(default_factory=list)
    _columns: Columns = field(default_factory=Columns)

    def add(self, event: TokenEvent) -> None:
        """One more token."""
        self._texts.append(event.text)
        if len(self._texts) == MAX_PIECES:
            self._texts = ["".join(self._texts)]
        if self.logprobs is not None:
            self._tokens.append((event.token_id, event.logprob, event.top))
            if len(self._tokens) == BLOCK_TOKENS:
                self._write()

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self._texts)

    def json(self, before: Columns | None) -> dict[str, orjson.Fragment] | None:
        """The value of ``logprobs``; the prompt's are those ``before``."""
        if self.logprobs is None:
            return None
        self._write()
        return self._columns.json(before)

    def _write(self) -> None:
        assert self.logprobs is not None
        self._columns.add(self.logprobs.of(self._tokens))
        self._tokens.clear()
