"""OpenAI's ``text_completion``, whole or in chunks, from the events of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.api.completion import DONE, ended, sse, total_usage
from server.api.errors import error_object
from server.api.frames import EpochName
from server.api.openai.logprobs import LegacyLogprobs, ScoredPrompt, TokenNames, prompt_logprobs
from server.api.translate import usage_object
from server.engine.errors import EngineError
from server.engine.types import Event, Finished, Request, Scored, Started, TokenEvent, Usage


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


TEXT = Shown()


@dataclass(slots=True)
class CompletionWriter:
    """Writes the answer to ``requests``, one of each prompt. ``created_s`` is a Unix time.

    Choices are numbered prompt by prompt. The events of a kept session have SSE
    ids: the epoch by its ``epoch_name``, which is asked when it has begun (the store
    may become another one until then), and the event's ``seq``, from which a client
    can resume. Where more are drawn than shown, the most probable
    are shown.
    """

    requests: tuple[Request, ...]
    model: str
    created_s: int
    epoch_name: EpochName = "-{}".format
    shown: Shown = TEXT
    _index: dict[str, int] = field(init=False, repr=False)
    _around: list[tuple[bytes, bytes, bytes]] = field(init=False, repr=False)
    _ended: dict[int, Finished] = field(init=False, repr=False, default_factory=dict)
    _logprobs: dict[int, LegacyLogprobs] = field(init=False, repr=False, default_factory=dict)
    _is_plain: bool = field(init=False, repr=False)
    _usage: Usage = field(init=False, repr=False, default=Usage(0, 0))
    _begins: dict[str, int] = field(init=False, repr=False, default_factory=dict)
    _id: bytes = field(init=False, repr=False, default=b"")

    def __post_init__(self) -> None:
        """Cuts a token's chunk at its text and its position: the rest is the same for all."""
        ids = [id for request in self.requests for id in request.ids]
        self._index = {id: index for index, id in enumerate(ids)}
        self._around = [self._cut_chunk(index) for index in self._index.values()]
        self._is_plain = self.shown.logprobs is None and not self.shown.usage_so_far

    # Whole

    def whole(self, events: list[Event]) -> bytes:
        """The JSON answer; raises the `EngineError` that one of the requests ended by."""
        own: dict[str, list[Event]] = {id: [] for id in self._index}
        for event in events:
            own[event.request_id].append(event)
        choices: list[dict[str, Any]] = []
        ends: list[Finished] = []
        for place, request in enumerate(self.requests):
            its_ends = [ended(own[id]) for id in request.ids]
            ends += its_ends
            its_choices = self._choices(place, [own[id] for id in request.ids])
            if len(its_choices) > self.shown.num:
                its_choices = _best(its_choices, its_ends, self.shown.num)
            choices += its_choices
        for index, choice in enumerate(choices):
            choice["index"] = index
        position = ends[0].position if len(self.requests) == 1 else None
        answer = self._object(choices, position, ends[0].session)
        return orjson.dumps({**answer, "usage": usage_object(total_usage(ends))})

    def _choices(self, place: int, own: list[list[Event]]) -> list[dict[str, Any]]:
        """Those of one prompt, with the events of each."""
        request, shown = self.requests[place], self.shown
        echo = shown.echo[place] if shown.echo else ""
        prompt = _scored(request, own[0]) if request.score else None
        choices = []
        for index, events in enumerate(own):
            tokens = [event for event in events if isinstance(event, TokenEvent)]
            end = events[-1]
            assert isinstance(end, Finished), end
            text = echo + "".join(event.text for event in tokens) + end.text
            choice = _choice(index, text, end.finish_reason or "length")
            if shown.logprobs is not None:
                choice["logprobs"] = self._all_logprobs(echo, prompt, tokens)
            choices.append(choice | self._prompt_logprobs(prompt))
        return choices

    def _all_logprobs(
        self, echo: str, prompt: ScoredPrompt | None, tokens: list[TokenEvent]
    ) -> dict[str, list[Any]]:
        """Those of the prompt, where it is shown, and of what was generated."""
        writer = self._new_logprobs()
        found = _of_prompt(writer, prompt) if prompt is not None and self.shown.echo else None
        writer.begin_anew(len(echo))
        generated = writer.of((e.token_id, e.logprob, e.top) for e in tokens)
        if found is None:
            return generated
        return {name: found[name] + generated[name] for name in found}

    # In chunks

    def chunks(self, event: Event) -> bytes:
        """The server-sent events for one event of the engine."""
        if isinstance(event, TokenEvent):
            if not self._is_plain:
                return self._detailed(event)
            before, between, after = self._around[self._index[event.request_id]]
            text = orjson.dumps(event.text)
            id = b"id: %b%d\n" % (self._id, event.seq) if self._id else b""
            return b"%b%b%b%b%d%b" % (id, before, text, between, event.position, after)
        if isinstance(event, Started):
            return self._started(event)
        if isinstance(event, Scored):
            return self._scored(event)
        try:
            last = ended([event])
        except EngineError as error:
            return sse({"error": error_object(error)})
        return self._finished(last)

    def end(self) -> bytes:
        """What comes after the last event of all choices."""
        if not self.shown.usage or len(self._ended) < len(self._index):
            return DONE
        ends = [self._ended[index] for index in sorted(self._ended)]
        position = ends[0].position if len(self.requests) == 1 else None
        chunk = self._object([], position, ends[0].session)
        return sse({**chunk, "usage": usage_object(total_usage(ends))}) + DONE

    def _started(self, event: Started) -> bytes:
        """The prompt's text; for a kept session a chunk that names it, with text or without."""
        place, request = self._request_of(event.request_id)
        self._begins[request.request_id] = event.position
        is_kept = request.keep or request.session is not None
        if is_kept:
            self._id = f"{self.epoch_name(event.epoch)}:".encode()
        echo = self.shown.echo[place] if self.shown.echo and not request.score else ""
        if not is_kept and not echo:
            return b""
        parts = [
            self._chunk([_choice(self._index[id], echo, None)], event.position, event.session)
            for id in request.ids
        ]
        return b"".join(parts)

    def _scored(self, event: Scored) -> bytes:
        """The prompt, as far as it is shown, and how likely it was, for each of its choices."""
        _, request = self._request_of(event.request_id)
        prompt = ScoredPrompt.of(request, event)
        position = self._begins.get(request.request_id, 0) + len(event.token_ids)
        choices = (self._prompt_choice(self._index[id], prompt, None) for id in request.ids)
        return b"".join(self._chunk([choice], position, None) for choice in choices)

    def _prompt_choice(
        self, index: int, prompt: ScoredPrompt, reason: str | None, text: str = ""
    ) -> dict[str, Any]:
        place = self._place(index)
        echo = self.shown.echo[place] if self.shown.echo else ""
        choice = _choice(index, echo + text, reason)
        if self.shown.logprobs is not None and self.shown.echo:
            writer = self._logprobs[index] = self._new_logprobs()
            choice["logprobs"] = _of_prompt(writer, prompt)
            writer.begin_anew(len(echo))
        return choice | self._prompt_logprobs(prompt)

    def _detailed(self, event: TokenEvent) -> bytes:
        """A token's chunk with its log-probabilities, or with the usage so far."""
        index = self._index[event.request_id]
        choice = _choice(index, event.text, None)
        if self.shown.logprobs is not None:
            token = (event.token_id, event.logprob, event.top)
            choice["logprobs"] = self._logprobs_of(index).of([token])
        self._count(event)
        id = b"id: %b%d\n" % (self._id, event.seq) if self._id else b""
        return id + self._chunk([choice], event.position, None)

    def _finished(self, last: Finished) -> bytes:
        index = self._index[last.request_id]
        self._ended[index] = last
        _, request = self._request_of(last.request_id)
        choice = _choice(index, last.text, last.finish_reason or "length")
        if request.score and request.sampling is None:
            prompt = ScoredPrompt.of(request, last)
            choice = self._prompt_choice(index, prompt, "length", last.text)
        if request.sampling is None:
            self._usage = Usage(self._usage.prompt_tokens + last.usage.prompt_tokens, 0)
        id = b"id: %b%d\n" % (self._id, last.seq) if self._id else b""
        return id + self._chunk([choice], last.position, last.session)

    def _count(self, event: TokenEvent) -> None:
        """The usage so far: a prompt counts once its first token has been drawn."""
        begin = self._begins.pop(event.request_id, None)
        fed = 0 if begin is None else event.position - begin
        self._usage = Usage(self._usage.prompt_tokens + fed, self._usage.completion_tokens + 1)

    # The parts

    def _request_of(self, request_id: str) -> tuple[int, Request]:
        place = self._place(self._index[request_id])
        return place, self.requests[place]

    def _place(self, index: int) -> int:
        return index // len(self.requests[0].ids)

    def _logprobs_of(self, index: int) -> LegacyLogprobs:
        if index not in self._logprobs:
            self._logprobs[index] = self._new_logprobs()
        return self._logprobs[index]

    def _new_logprobs(self) -> LegacyLogprobs:
        assert self.shown.names is not None and self.shown.logprobs is not None, self.shown
        return LegacyLogprobs(self.shown.names, self.shown.logprobs)

    def _prompt_logprobs(self, prompt: ScoredPrompt | None) -> dict[str, Any]:
        """``prompt_logprobs``, where asked for."""
        num_top, names = self.shown.prompt_logprobs, self.shown.names
        if num_top is None or prompt is None:
            return {}
        assert names is not None, self.shown
        return {"prompt_logprobs": prompt_logprobs(prompt, names, num_top)}

    def _cut_chunk(self, index: int) -> tuple[bytes, bytes, bytes]:
        head, _, after = self._chunk([_choice(index, "TEXT", None)], 1, None).rpartition(b"1")
        before, _, between = head.rpartition(b'"TEXT"')
        return before, between, after

    def _chunk(self, choices: list[dict[str, Any]], position: int, session: str | None) -> bytes:
        chunk = self._object(choices, position, session)
        if self.shown.usage_so_far:
            chunk["usage"] = usage_object(self._usage)
        elif self.shown.usage:
            chunk["usage"] = None
        return sse(chunk)

    def _object(
        self, choices: list[dict[str, Any]], position: int | None, session: str | None
    ) -> dict[str, Any]:
        request = self.requests[0]
        return {
            "id": request.request_id,
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
            "session": session,
            "seed": request.sampling.seed if request.sampling is not None else None,
            "position": position,
        }


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _best(
    choices: list[dict[str, Any]], ends: Sequence[Finished], num: int
) -> list[dict[str, Any]]:
    """Those with the highest log-probability per token, best first."""

    def mean(index: int) -> float:
        return (ends[index].logprob_sum or 0.0) / max(1, ends[index].usage.completion_tokens)

    return [choices[index] for index in sorted(range(len(choices)), key=mean, reverse=True)[:num]]


def _scored(request: Request, events: list[Event]) -> ScoredPrompt | None:
    """What its events say of a request's prompt; nothing where it ended before."""
    for event in events:
        if isinstance(event, Scored) or (isinstance(event, Finished) and request.sampling is None):
            return ScoredPrompt.of(request, event)
    return None


def _of_prompt(writer: LegacyLogprobs, prompt: ScoredPrompt) -> dict[str, list[Any]]:
    return writer.of(zip(prompt.token_ids, prompt.logprobs, prompt.tops, strict=True))
