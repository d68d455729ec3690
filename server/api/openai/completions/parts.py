"""What the answer to `POST /v1/completions` says of a prompt and of a choice, as JSON.

Lists of log-probabilities are written in blocks as they come, so that an answer takes
no more memory than its JSON, and no block takes long.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal, NotRequired

import orjson
from typing_extensions import TypedDict

from server.api.openai.logprobs import (
    Columns,
    LegacyLogprobs,
    ScoredPrompt,
    TokenNames,
    joined,
    prompt_logprobs,
)
from server.api.openai.writer import WrittenChoice
from server.api.schemas.requests import StreamOptions
from server.api.schemas.responses import PromptUsage
from server.engine.types import Finished, Scored, TokenEvent
from server.engine.types import Request as EngineRequest


class LegacyLogprobsAnswer(TypedDict):
    """OpenAI's: of each token its text, its log-probability, those of others, and its place."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(TypedDict):
    """vLLM's; the rank is known of the most probable tokens alone."""

    logprob: float
    rank: int | None
    decoded_token: str


class Choice(TypedDict):
    """A text."""

    index: int
    text: str
    logprobs: LegacyLogprobsAnswer | None
    finish_reason: Literal["stop", "length", "cancelled"]
    prompt_logprobs: NotRequired[list[dict[str, RankedLogprob] | None]]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """OpenAI's ``text_completion``, with the session, the seed and the position.

    ``position`` is null where there are several prompts, ``seed`` where nothing is generated.
    ``prefix`` is there where it was asked for and the prompt's state is kept.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: PromptUsage
    session: str | None
    seed: int | None
    position: int | None
    prefix: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer has apart from the text.

    ``num`` choices of each prompt. ``names`` are needed for ``logprobs`` and
    ``prompt_logprobs``: so many of the most probable tokens, None for none at all. With
    ``token_ids`` those of the prompt and of the text are shown.
    ``echo`` has the prompts' texts.
    """

    num: int = 1
    options: StreamOptions | None = None
    echo: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    names: TokenNames | None = None

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


class TextChoice(WrittenChoice):
    """One choice of ``request``'s: its text and log-probabilities, as far as they have come.

    The request's first choice also has what is known of its prompt.
    """

    def __init__(self, index: int, request: EngineRequest, echo: str, shown: Shown) -> None:
        self.index, self.request, self.echo = index, request, echo
        #: Where its prompt begins, until a token was drawn after it.
        self.begin: int | None = None
        self.scored: Scored | None = None
        #: The ids of the prompt and of the text, where they are shown.
        self.prompt_ids: Sequence[int] | None = request.tokens if shown.token_ids else None
        self.token_ids: list[int] = []
        self.logprobs = None if shown.logprobs is None else shown.legacy(len(echo))
        self._text = StringIO()
        self._columns = None if shown.logprobs is None else Columns()

    def add(self, event: TokenEvent) -> None:
        """One more token of a whole answer."""
        self._text.write(event.text)
        if self.prompt_ids is not None:
            self.token_ids.append(event.token_id)
        if self.logprobs is not None and self._columns is not None:
            self._columns.add(self.logprobs.of([(event.token_id, event.logprob, event.top)]))

    def whole(self, index: int, prompt: PromptJson) -> dict[str, Any]:
        """All of it, as the answer's choice number ``index``."""
        assert isinstance(self.last, Finished), self.index
        text = self.echo + self._text.getvalue() + self.last.text
        logprobs = None if self._columns is None else self._columns.json(prompt.columns)
        reason = self.last.finish_reason or "length"
        more = prompt.more
        if self.prompt_ids is not None:
            more |= {"prompt_token_ids": [*self.prompt_ids], "token_ids": self.token_ids}
        return choice_json(index, text, reason, logprobs=logprobs, **more)

    @property
    def mean_logprob(self) -> float:
        """Per token."""
        assert isinstance(self.last, Finished), self.index
        return (self.last.logprob_sum or 0.0) / max(1, self.last.usage.completion_tokens)


def choice_json(index: int, text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """OpenAI's choice."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason, **more}
