"""OpenAI's ``text_completion``, whole or in chunks, from the events of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.api.errors import SessionMigrated, error_object
from server.api.translate import usage_object
from server.engine.errors import EngineError, InternalFailure
from server.engine.types import Event, Failed, Finished, Request, Started, TokenEvent, Usage

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class CompletionWriter:
    """Writes the answer to ``request``. ``created_s`` is a Unix time.

    The events of a kept session have SSE ids: ``epoch`` (without its number), the
    number, and the event's ``seq``, from which a client can resume. Where more
    are drawn than ``num_shown``, the most probable are shown.
    """

    request: Request
    model: str
    created_s: int
    epoch: str = ""
    include_usage: bool = False
    num_shown: int = 1
    _index: dict[str, int] = field(init=False, repr=False)
    _around: list[tuple[bytes, bytes, bytes]] = field(init=False, repr=False)
    _ended: dict[int, Finished] = field(init=False, repr=False, default_factory=dict)
    _id: bytes = field(init=False, repr=False, default=b"")

    def __post_init__(self) -> None:
        """Cuts a token's chunk at its text and its position: the rest is the same for all."""
        self._index = {id: index for index, id in enumerate(self.request.ids)}
        self._around = [self._cut_chunk(index) for index in self._index.values()]

    def whole(self, events: list[Event]) -> bytes:
        """The JSON answer; raises the `EngineError` that the request ended by."""
        choices: list[dict[str, Any]] = []
        ends: list[Finished] = []
        own: dict[str, list[Event]] = {id: [] for id in self._index}
        for event in events:
            own[event.request_id].append(event)
        for id, index in self._index.items():
            last = ended(own[id])
            text = "".join(e.text for e in own[id] if isinstance(e, TokenEvent | Finished))
            choices.append(_choice(index, text, last.finish_reason))
            ends.append(last)
        if len(choices) > self.num_shown:
            choices = _best(choices, ends, self.num_shown)
        answer = self._object(choices, ends[0].position, ends[0].session)
        return orjson.dumps({**answer, "usage": usage_object(_total(ends))})

    def chunks(self, event: Event) -> bytes:
        """The server-sent events for one event of the engine."""
        if isinstance(event, TokenEvent):
            before, between, after = self._around[self._index[event.request_id]]
            text = orjson.dumps(event.text)
            id = b"id: %b%d\n" % (self._id, event.seq) if self._id else b""
            return b"%b%b%b%b%d%b" % (id, before, text, between, event.position, after)
        if isinstance(event, Started):
            return self._started(event)
        try:
            last = ended([event])
        except EngineError as error:
            return sse({"error": error_object(error)})
        index = self._index[last.request_id]
        self._ended[index] = last
        choices = [_choice(index, last.text, last.finish_reason)]
        id = b"id: %b%d\n" % (self._id, last.seq) if self._id else b""
        return id + self._chunk(choices, last.position, last.session)

    def end(self) -> bytes:
        """What comes after the last event of all choices."""
        if not self.include_usage or len(self._ended) < len(self._index):
            return DONE
        last = self._ended[0]
        chunk = self._object([], last.position, last.session)
        return sse({**chunk, "usage": usage_object(_total(list(self._ended.values())))}) + DONE

    def _started(self, event: Started) -> bytes:
        """For a kept session a chunk without text, which names it."""
        if not self.request.keep and self.request.session is None:
            return b""
        self._id = f"{self.epoch}-{event.epoch}:".encode()
        return self._chunk([_choice(0, "", None)], event.position, event.session)

    def _cut_chunk(self, index: int) -> tuple[bytes, bytes, bytes]:
        head, _, after = self._chunk([_choice(index, "TEXT", None)], 1, None).rpartition(b"1")
        before, _, between = head.rpartition(b'"TEXT"')
        return before, between, after

    def _chunk(self, choices: list[dict[str, Any]], position: int, session: str | None) -> bytes:
        chunk = self._object(choices, position, session)
        if self.include_usage:
            chunk["usage"] = None
        return sse(chunk)

    def _object(
        self, choices: list[dict[str, Any]], position: int, session: str | None
    ) -> dict[str, Any]:
        assert self.request.sampling is not None
        return {
            "id": self.request.request_id,
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
            "session": session,
            "seed": self.request.sampling.seed,
            "position": position,
        }


def appended_body(events: list[Event]) -> bytes:
    """The JSON answer to an append; raises the `EngineError` that it ended by."""
    last = ended(events)
    if last.finish_reason == "cancelled":
        raise InternalFailure("the session was deleted meanwhile")
    body = {"session": last.session, "position": last.position, "usage": usage_object(last.usage)}
    scored = {} if last.logprobs is None else {"logprobs": last.logprobs}
    return orjson.dumps(body | scored)


def ended(events: Sequence[Event]) -> Finished:
    """The end of a request; raises the `EngineError` where it is none to show."""
    last = events[-1]
    if isinstance(last, Failed):
        raise last.error
    if not isinstance(last, Finished):
        raise SessionMigrated
    if last.finish_reason == "error":
        raise InternalFailure(last.error or "the request failed")
    return last


def sse(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def _best(
    choices: list[dict[str, Any]], ends: Sequence[Finished], num: int
) -> list[dict[str, Any]]:
    """Those with the highest log-probability per token, best first, numbered anew."""

    def mean(index: int) -> float:
        return (ends[index].logprob_sum or 0.0) / max(1, ends[index].usage.completion_tokens)

    best = sorted(range(len(choices)), key=mean, reverse=True)[:num]
    return [{**choices[index], "index": place} for place, index in enumerate(best)]


def _total(ends: Sequence[Finished]) -> Usage:
    return Usage(
        sum(end.usage.prompt_tokens for end in ends),
        sum(end.usage.completion_tokens for end in ends),
    )
