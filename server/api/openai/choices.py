"""What the answers of completions and of chats share: parts, chunks, usage, log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import orjson

from model.tokenizer import Tokenizer
from server.api.answers import (
    COMMENT,
    COMMENT_BETWEEN_IDS,
    DONE,
    HEADERS,
    server_sent,
    sse,
    total_usage,
    usage_object,
    whole_usage,
)
from server.api.errors import error_object
from server.api.events import EpochName
from server.api.schemas.requests import StreamOptions
from server.engine.types import Event, Finished, Request, Scored, Usage
from server.errors import RequestError

# -------------------------------------------------------------------------------------------------
# What the answers of completions and of chats share: whole in parts, or in chunks, with usage.


Json = dict[str, Any]


class WrittenChoice:
    """One continuation while it comes, number ``index`` of the answer."""

    index: int
    #: The event that it ended by.
    last: Event | None = None
    #: A token's chunk around what differs from token to token, once it is needed.
    around: tuple[bytes, ...] = ()


C = TypeVar("C", bound=WrittenChoice)


class AnswerWriter(Generic[C]):
    """Writes the ``choices`` of an answer, by the ids of their events, into what ``head`` says.

    Usage ends a stream, or is in each chunk so far, where its ``options`` say so. The events of a
    kept session have SSE ids: the epoch by its ``epoch_name``, which is asked when the session has
    started (the store may become another one until then), and the event's ``seq``, from which a
    client can resume.
    """

    headers = HEADERS

    def __init__(
        self,
        head: Json,
        choices: Mapping[str, C],
        options: StreamOptions | None,
        epoch_name: EpochName,
        is_kept: bool,
    ) -> None:
        self._epoch_name, self._is_kept = epoch_name, is_kept
        self.comment = COMMENT_BETWEEN_IDS if is_kept else COMMENT
        #: What the SSE ids of a kept session begin with, once it has started.
        self._id = b""
        self._head = {**head, "choices": []}
        self._choices = choices
        self._shows_usage = bool(options and options.include_usage)
        self._shows_so_far = bool(options and options.continuous_usage_stats)
        self._so_far = Usage(0, 0)

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that cannot be finished."""
        return sse({"error": error_object(error)}) + DONE

    def end(self) -> bytes:
        """What comes after the last event of all choices."""
        if not self._shows_usage or len(self._ends) < len(self._choices):
            return DONE
        return server_sent(orjson.dumps(self._summary())) + DONE

    @property
    def _ends(self) -> list[Finished]:
        lasts = (choice.last for choice in self._choices.values())
        return [last for last in lasts if isinstance(last, Finished)]

    def _summary(self) -> Json:
        """What an answer says of all of its choices."""
        return {**self._head, "usage": whole_usage(total_usage(self._ends))}

    def _sse_id(self, seq: int) -> bytes | None:
        return b"%b%d" % (self._id, seq) if self._id else None

    def _chunk(self, choice: Json, id: bytes | None = None, **more: Any) -> bytes:
        """A server-sent event of one choice."""
        chunk = {**self._head, "choices": [choice], **more}
        if self._shows_so_far:
            chunk["usage"] = usage_object(self._so_far)
        elif self._shows_usage:
            chunk["usage"] = None
        return server_sent(orjson.dumps(chunk), id=id)


def written_list(answer: Mapping[str, Any], name: str, items: Iterable[bytes]) -> Iterator[bytes]:
    """The JSON of ``answer``, in parts, with ``items`` in its list ``name``, which is empty.

    Empty items are skipped: other work can run there.
    """
    head, mark, tail = orjson.dumps(answer).partition(b'"%b":[' % name.encode())
    yield head + mark
    is_first = True
    for item in items:
        yield item if is_first or not item else b"," + item
        is_first = is_first and not item
    yield tail


# -------------------------------------------------------------------------------------------------
# Log-probabilities as OpenAI's first API writes them, and as vLLM writes those of a prompt.


Top = Sequence[tuple[int, float]]

#: JSON has no infinity; OpenAI writes this for what can hardly be.
LEAST = -9999.0

#: Tokens whose log-probabilities are written at once.
BLOCK_TOKENS = 64


class TokenNames:
    """Tokens as text; bytes that are not whole characters as in OpenAI's API: ``bytes:\\xe2``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known = dict(tokenizer.special_names)

    def __getitem__(self, id: int) -> str:
        name = self._known.get(id)
        if name is None:
            name = self._known[id] = self._name(id)
        return name

    def _name(self, id: int) -> str:
        data = self.tokenizer.token_bytes(id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """How likely a prompt was. ``num_before`` tokens, the start token, came before it.

    Each token has its log-probability and the most probable ones in its place, or
    None and () where it begins a text. The prompt ``begins`` a text, or continues a session's.
    """

    num_before: int
    token_ids: Sequence[int]
    logprobs: tuple[float | None, ...]
    tops: tuple[Top, ...]
    begins: bool = True

    @classmethod
    def of(cls, request: Request, event: Scored | Finished) -> ScoredPrompt:
        """From what the engine says of a prompt that is generated from, or only fed."""
        size, logprobs = len(request.tokens), event.logprobs or ()
        tops = event.tops or ((),) * len(logprobs)
        num_fed = event.usage.prompt_tokens if isinstance(event, Finished) else len(event.token_ids)
        unknown = max(0, size - len(logprobs))
        first = len(logprobs) - size + unknown
        return cls(
            num_fed - size,
            request.tokens,
            (None,) * unknown + tuple(logprobs[first:]),
            ((),) * unknown + tuple(tops[first:]),
            request.session is None or num_fed > size,
        )

    @property
    def items(self) -> Iterator[tuple[int, float | None, Top]]:
        """Each token, its log-probability, and the most probable ones in its place."""
        return zip(self.token_ids, self.logprobs, self.tops, strict=True)

    def blocks(self) -> Iterator[ScoredPrompt]:
        """The same in pieces, each of which is written in a few milliseconds."""
        for start in range(0, max(1, len(self.token_ids)), BLOCK_TOKENS):
            part = slice(start, start + BLOCK_TOKENS)
            num_before = 0 if start else self.num_before
            ids, logprobs, tops = self.token_ids[part], self.logprobs[part], self.tops[part]
            yield ScoredPrompt(num_before, ids, logprobs, tops)


@dataclass(slots=True)
class LegacyLogprobs:
    """OpenAI's ``logprobs`` of one choice, token by token.

    ``num_top`` of the most probable tokens are named, and the token itself.
    ``text_offset`` counts the characters that were whole before a token; it
    begins at ``offset``, and a text with ``at_start``.
    """

    names: TokenNames
    num_top: int
    offset: int = 0
    at_start: bool = False
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
            data = self.names.tokenizer.token_bytes(id)
            if self.at_start and data:
                self.at_start, data = False, self.names.tokenizer.first_bytes(id)
            self.offset += len(self._decoder.decode(data))
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, id: int, logprob: float, top: Top) -> dict[str, float]:
        """Two ids can have one name; the more probable one has it."""
        found: dict[str, float] = {}
        for other, value in top[: self.num_top]:
            found.setdefault(self.names[other], _at_least(value))
        found.setdefault(self.names[id], _at_least(logprob))
        return found


class JsonList:
    """A list of tokens as JSON, which is written in blocks while it grows."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._items: list[Any] = []

    def add(self, items: Sequence[Any]) -> None:
        """More of them."""
        self._items += items
        if len(self._items) >= BLOCK_TOKENS:
            self._write()

    def json(self, before: JsonList | None = None) -> orjson.Fragment:
        """The whole list, behind ``before``."""
        return joined([*(before._written() if before is not None else ()), *self._written()])

    def _written(self) -> list[bytes]:
        if self._items:
            self._write()
        return self._blocks

    def _write(self) -> None:
        self._blocks.append(orjson.dumps(self._items)[1:-1])
        self._items.clear()


class Columns:
    """The lists of `LegacyLogprobs.of` as JSON, which grow block by block."""

    def __init__(self) -> None:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        self._lists = {name: JsonList() for name in names}

    def add(self, found: dict[str, list[Any]]) -> None:
        """More tokens."""
        for name, items in found.items():
            self._lists[name].add(items)

    def json(self, before: Columns | None = None) -> dict[str, orjson.Fragment]:
        """The whole lists, behind those of ``before``."""
        first = before._lists if before is not None else {}
        return {name: items.json(first.get(name)) for name, items in self._lists.items()}


def joined(blocks: Sequence[bytes]) -> orjson.Fragment:
    """A list of JSON, from blocks of its items."""
    return orjson.Fragment(b"[%b]" % b",".join(blocks))


def prompt_logprobs(
    prompt: ScoredPrompt, names: TokenNames, num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's: for each token a dictionary by id, null for what begins a text.

    ``rank`` is known of the most probable ones alone.
    """
    entries: list[dict[str, dict[str, Any]] | None] = [None] * prompt.num_before
    for id, logprob, top in prompt.items:
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
