"""OpenAI's ``text_completion``, whole or in chunks, from the events of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from server.api.errors import error_object
from server.api.translate import usage_object
from server.engine.errors import InternalFailure
from server.engine.types import Event, Finished, Request, Started, TokenEvent

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    """Writes the answer to ``request``. ``created_s`` is a Unix time."""

    request: Request
    model: str
    created_s: int
    include_usage: bool = False
    _around: tuple[bytes, bytes, bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Cuts a token's chunk at its text and its position: the rest is the same for all."""
        head, _, after = self._chunk("TEXT", None, 1, None).rpartition(b"1")
        before, _, between = head.rpartition(b'"TEXT"')
        object.__setattr__(self, "_around", (before, between, after))

    def whole(self, events: list[Event]) -> bytes:
        """The JSON answer; raises `InternalFailure` where the request ended by an error."""
        last = _last(events)
        text = "".join(event.text for event in events if not isinstance(event, Started))
        answer = self._object(text, last.finish_reason, last.position, last.session)
        return orjson.dumps({**answer, "usage": usage_object(last.usage)})

    def chunks(self, event: Event) -> bytes:
        """The server-sent events for one event of the engine; the last ends with ``[DONE]``."""
        if isinstance(event, TokenEvent):
            before, between, after = self._around
            text = orjson.dumps(event.text)
            return b"%b%b%b%d%b" % (before, text, between, event.position, after)
        if isinstance(event, Started):
            return b""
        if event.finish_reason == "error":
            error = InternalFailure(event.error or "the request failed")
            return sse({"error": error_object(error)}) + DONE
        chunk = self._chunk(event.text, event.finish_reason, event.position, event.session)
        return chunk + self._usage_chunk(event) + DONE

    def _chunk(self, text: str, reason: str | None, position: int, session: str | None) -> bytes:
        chunk = self._object(text, reason, position, session)
        if self.include_usage:
            chunk["usage"] = None
        return sse(chunk)

    def _usage_chunk(self, event: Finished) -> bytes:
        if not self.include_usage:
            return b""
        chunk = self._object("", None, event.position, event.session)
        return sse({**chunk, "choices": [], "usage": usage_object(event.usage)})

    def _object(
        self, text: str, reason: str | None, position: int, session: str | None
    ) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        assert self.request.sampling is not None
        return {
            "id": self.request.request_id,
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": [choice],
            "session": session,
            "seed": self.request.sampling.seed,
            "position": position,
        }


def appended_body(events: list[Event]) -> bytes:
    """The JSON answer to an append; raises `InternalFailure` where it did not succeed."""
    last = _last(events)
    if last.finish_reason == "cancelled":
        raise InternalFailure("the session was deleted meanwhile")
    return orjson.dumps(
        {"session": last.session, "position": last.position, "usage": usage_object(last.usage)}
    )


def _last(events: list[Event]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished), last
    if last.finish_reason == "error":
        raise InternalFailure(last.error or "the request failed")
    return last


def sse(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"
