"""Log-probabilities as OpenAI's first API writes them, and as vLLM writes those of a prompt."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.engine.types import Finished, Request, Scored

Top = Sequence[tuple[int, float]]

#: JSON has no infinity; OpenAI writes this for what can hardly be.
LEAST = -9999.0


class TokenTexts(Protocol):
    """What is needed of `model.tokenizer.Tokenizer`."""

    @property
    def special_ids(self) -> dict[str, int]: ...
    def token_bytes(self, id: int, /) -> bytes: ...


class TokenNames:
    """Tokens as text: what is no whole characters is ``bytes:\\xe2\\x80``, as OpenAI shows it."""

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._special = {id: name for name, id in tokenizer.special_ids.items()}

    def __getitem__(self, id: int) -> str:
        name = self._special.get(id)
        if name is not None:
            return name
        data = self._tokenizer.token_bytes(id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def data(self, id: int) -> bytes:
        """The bytes of a token; none for a special one."""
        return self._tokenizer.token_bytes(id)


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """How likely a prompt was. ``num_before`` tokens, the start token, came before it.

    Each token has its log-probability and the most probable ones in its place, or
    None and () where it begins a text.
    """

    num_before: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    tops: tuple[Top, ...]

    @classmethod
    def of(cls, request: Request, event: Scored | Finished) -> ScoredPrompt:
        """From what the engine says of a prompt that is generated from, or only fed."""
        size = len(request.tokens)
        if isinstance(event, Scored):
            num_before = len(event.token_ids) - size
            return cls(
                num_before, request.tokens, event.logprobs[num_before:], event.tops[num_before:]
            )
        known = event.logprobs or ()
        tops = event.tops or ((),) * len(known)
        none = size - len(known)
        return cls(
            event.usage.prompt_tokens - size,
            request.tokens,
            (None,) * none + tuple(known),
            ((),) * none + tuple(tops),
        )


@dataclass(slots=True)
class LegacyLogprobs:
    """OpenAI's ``logprobs`` of one choice, token by token.

    ``num_top`` of the most probable tokens are named, and the token itself.
    ``text_offset`` counts the characters that were whole before a token; it
    begins at ``offset``.
    """

    names: TokenNames
    num_top: int
    offset: int = 0
    _decoder: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def of(self, tokens: Iterable[tuple[int, float | None, Top]]) -> dict[str, list[Any]]:
        """The object of ``tokens``, which follow those of the last call."""
        names: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for id, logprob, top in tokens:
            names.append(self.names[id])
            logprobs.append(finite(logprob))
            tops.append(None if logprob is None else self._top(id, logprob, top))
            offsets.append(self.offset)
            self.offset += len(self._decoder.decode(self.names.data(id)))
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def begin_anew(self, offset: int) -> None:
        """What follows begins a text of its own at ``offset``: an unfinished character ends."""
        self._decoder.reset()
        self.offset = offset

    def _top(self, id: int, logprob: float, top: Top) -> dict[str, float]:
        """Two ids can have one name; the more probable one has it."""
        found: dict[str, float] = {}
        for other, value in top[: self.num_top]:
            found.setdefault(self.names[other], _at_least(value))
        found.setdefault(self.names[id], _at_least(logprob))
        return found


def prompt_logprobs(
    prompt: ScoredPrompt, names: TokenNames, num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's: for each token a dictionary by id, null for what begins a text.

    ``rank`` is known of the most probable ones alone.
    """
    entries: list[dict[str, dict[str, Any]] | None] = [None] * prompt.num_before
    for id, logprob, top in zip(prompt.token_ids, prompt.logprobs, prompt.tops, strict=True):
        if logprob is None:
            entries.append(None)
            continue
        entry = {
            str(other): _ranked(names[other], value, rank)
            for rank, (other, value) in enumerate(top[:num_top], 1)
        }
        entry.setdefault(str(id), _ranked(names[id], logprob, None))
        entries.append(entry)
    return entries


def _ranked(name: str, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": _at_least(logprob), "rank": rank, "decoded_token": name}


def finite(logprob: float | None) -> float | None:
    """A number that JSON has."""
    return None if logprob is None else _at_least(logprob)


def _at_least(logprob: float) -> float:
    return max(LEAST, logprob)
