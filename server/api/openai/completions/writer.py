"""OpenAI's ``text_completion``, whole or in chunks, from the events of its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.api.completion import DONE, around_list, ended, sse, total_usage
from server.api.errors import error_object
from server.api.openai.completions.parts import Generated, PromptJson, Shown, write_prompt
from server.api.openai.logprobs import LegacyLogprobs, ScoredPrompt
from server.api.schemas.frames import EpochName
from server.api.translate import usage_object, whole_usage
from server.engine.types import Event, Finished, Request, Scored, Started, TokenEvent, Usage
from server.errors import RequestError

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
    _generated: list[Generated] = field(init=False, repr=False)
    _scores: dict[int, Scored] = field(init=False, repr=False, default_factory=dict)
    _lasts: dict[int, Event] = field(init=False, repr=False, default_factory=dict)
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
        self._generated = [self._new_text(index) for index in self._index.values()]
        self._is_plain = self.shown.logprobs is None and not self.shown.usage_so_far

    # Whole

    def add(self, event: Event) -> None:
        """Takes in an event of a whole answer."""
        index = self._index[event.request_id]
        if isinstance(event, TokenEvent):
            self._generated[index].add(event)
        elif isinstance(event, Scored):
            self._scores[self._place(index)] = event
        elif not isinstance(event, Started):
            self._lasts[index] = event

    def whole(self) -> Iterator[bytes]:
        """The JSON answer, in parts. Raises the `RequestError` that ended a request."""
        ends = [ended([self._lasts[index]]) for index in range(len(self._index))]
        position = ends[0].position if len(self.requests) == 1 else None
        answer = self._object([], position, ends[0].session)
        usage = whole_usage(total_usage(ends))
        before, after = around_list({**answer, "usage": usage}, "choices")
        yield before
        num_written = 0
        for place, request in enumerate(self.requests):
            prompt = PromptJson()
            if (scored := self._scored_prompt(place, ends)) is not None:
                prompt = yield from write_prompt(ScoredPrompt.of(request, scored), self.shown)
            for index in self._best(place, ends):
                choice = {**self._choice(index, prompt, ends[index]), "index": num_written}
                yield (b"," if num_written else b"") + orjson.dumps(choice)
                num_written += 1
        yield after

    def _scored_prompt(self, place: int, ends: Sequence[Finished]) -> Scored | Finished | None:
        """What says how likely a prompt was; nothing where its request ended before."""
        request = self.requests[place]
        if not request.score:
            return None
        return self._scores.get(place) if request.sampling is not None else ends[place]

    def _best(self, place: int, ends: Sequence[Finished]) -> list[int]:
        """The choices of a prompt; of more than are shown the most probable ones, best first."""
        num_drawn = len(self.requests[0].ids)
        indices = list(range(place * num_drawn, (place + 1) * num_drawn))
        if num_drawn <= self.shown.num:
            return indices
        return sorted(indices, key=lambda index: _mean(ends[index]), reverse=True)[: self.shown.num]

    def _choice(self, index: int, prompt: PromptJson, end: Finished) -> dict[str, Any]:
        generated, echo = self._generated[index], self.shown.echo_of(self._place(index))
        text = echo + generated.text + end.text
        choice = _choice(index, text, end.finish_reason or "length")
        return choice | {"logprobs": generated.json(prompt.columns)} | prompt.more

    # In chunks

    def parts(self, event: Event) -> Iterator[bytes] | None:
        """The server-sent events for one that tells of each token of a prompt; None for others."""
        if isinstance(event, Scored):
            begin = self._begins.get(event.request_id, 0)
            return self._scored(event, begin + len(event.token_ids))
        if isinstance(event, Finished) and event.finish_reason is None:
            _, request = self._request_of(event.request_id)
            return self._fed(event) if request.score else None
        return None

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
        if (parts := self.parts(event)) is not None:
            return b"".join(parts)
        try:
            last = ended([event])
        except RequestError as error:
            return sse({"error": error_object(error)})
        return self._finished(last)

    def end(self) -> bytes:
        """What comes after the last event of all choices."""
        if not self.shown.usage or len(self._ended) < len(self._index):
            return DONE
        ends = [self._ended[index] for index in sorted(self._ended)]
        position = ends[0].position if len(self.requests) == 1 else None
        chunk = self._object([], position, ends[0].session)
        return sse({**chunk, "usage": whole_usage(total_usage(ends))}) + DONE

    def _started(self, event: Started) -> bytes:
        """The prompt's text; for a kept session a chunk that names it, with text or without."""
        place, request = self._request_of(event.request_id)
        self._begins[request.request_id] = event.position
        is_kept = request.keep or request.session is not None
        if is_kept:
            self._id = f"{self.epoch_name(event.epoch)}:".encode()
        echo = "" if request.score else self.shown.echo_of(place)
        if not is_kept and not echo:
            return b""
        parts = [
            self._chunk([_choice(self._index[id], echo, None)], event.position, event.session)
            for id in request.ids
        ]
        return b"".join(parts)

    def _scored(
        self, event: Scored | Finished, position: int, session: str | None = None
    ) -> Iterator[bytes]:
        """The prompt, as far as it is shown, and how likely it was, for each of its choices."""
        place, request = self._request_of(event.request_id)
        prompt = yield from write_prompt(ScoredPrompt.of(request, event), self.shown)
        is_end = isinstance(event, Finished)
        text = self.shown.echo_of(place) + (event.text if isinstance(event, Finished) else "")
        for id in request.ids:
            choice = _choice(self._index[id], text, "length" if is_end else None) | prompt.more
            if prompt.columns is not None:
                choice["logprobs"] = prompt.columns.json()
            yield self._chunk([choice], position, session)

    def _fed(self, last: Finished) -> Iterator[bytes]:
        """The only chunk of a prompt that is not generated from."""
        self._note_end(last)
        if self._id:
            yield b"id: %b%d\n" % (self._id, last.seq)
        yield from self._scored(last, last.position, last.session)

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
        self._note_end(last)
        index = self._index[last.request_id]
        choice = _choice(index, last.text, last.finish_reason or "length")
        id = b"id: %b%d\n" % (self._id, last.seq) if self._id else b""
        return id + self._chunk([choice], last.position, last.session)

    def _note_end(self, last: Finished) -> None:
        self._ended[self._index[last.request_id]] = last
        _, request = self._request_of(last.request_id)
        if request.sampling is None:
            self._usage = Usage(self._usage.prompt_tokens + last.usage.prompt_tokens, 0)

    def _count(self, event: TokenEvent) -> None:
        """The usage so far: a prompt counts once its first token has been drawn."""
        begin = self._begins.pop(event.request_id, None)
        fed = 0 if begin is None else event.position - begin
        self._usage = Usage(self._usage.prompt_tokens + fed, self._usage.completion_tokens + 1)

    # The parts

    def _new_text(self, index: int) -> Generated:
        offset = len(self.shown.echo_of(self._place(index)))
        return Generated(None if self.shown.logprobs is None else self.shown.legacy(offset))

    def _request_of(self, request_id: str) -> tuple[int, Request]:
        place = self._place(self._index[request_id])
        return place, self.requests[place]

    def _place(self, index: int) -> int:
        return index // len(self.requests[0].ids)

    def _logprobs_of(self, index: int) -> LegacyLogprobs:
        if index not in self._logprobs:
            echo = self.shown.echo_of(self._place(index))
            self._logprobs[index] = self.shown.legacy(len(echo))
        return self._logprobs[index]

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


def _mean(end: Finished) -> float:
    """The log-probability per token."""
    return (end.logprob_sum or 0.0) / max(1, end.usage.completion_tokens)
