"""The server's WebSocket frames as JSON in UTF-8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.api.errors import error_object, outcome
from server.api.translate import usage_object
from server.engine.types import (
    Event,
    Failed,
    Finished,
    Migrated,
    Request,
    Scored,
    SessionInfo,
    Started,
    TokenEvent,
)
from server.errors import RequestError
from server.sessions.resume import Resumed

#: Writes an epoch's number as clients know it.
EpochName = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class FrameWriter:
    """A live request of a socket, under the client's name for it.

    ``request`` is None where it was resumed: it has started long ago.
    """

    request_id: str
    request: Request | None
    epoch_name: EpochName
    _before: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Writes what all of its tokens' frames begin with."""
        head = encode({"type": "token", "request_id": self.request_id})
        object.__setattr__(self, "_before", head[:-1])

    def frame(self, event: Event) -> bytes | None:
        """The frame for an event of this request, if the event has one."""
        if isinstance(event, TokenEvent):
            return self.token(event)
        if isinstance(event, Started):
            return self._started(event)
        if isinstance(event, Scored):  # nothing of a socket asks for it
            return None
        if isinstance(event, Failed):
            return error_frame(self.request_id, event.error)
        if isinstance(event, Migrated):
            return self._migrate(event)
        return self.finished(event)

    def token(self, event: TokenEvent) -> bytes:
        """The frame for one token of this request."""
        frame = b'%b,"seq":%d,"position":%d,"token_id":%d,"text":%b}' % (
            self._before,
            event.seq,
            event.position,
            event.token_id,
            orjson.dumps(event.text),
        )
        return frame if event.logprob is None else b"%b,%b" % (frame[:-1], _logprobs(event))

    def _started(self, event: Started) -> bytes | None:
        if self.request is None or self.request.sampling is None:
            return None
        return encode(
            {
                "type": "started",
                "request_id": self.request_id,
                "session": event.session,
                "epoch": self.epoch_name(event.epoch),
                "seq": event.seq,
                "position": event.position,
                "seed": self.request.sampling.seed,
            }
        )

    def _migrate(self, event: Migrated) -> bytes:
        return encode(
            {
                "type": "migrate",
                "request_id": self.request_id,
                "session": event.session,
                "epoch": self.epoch_name(event.epoch),
                "seq": event.seq,
                "position": event.position,
            }
        )

    def finished(self, event: Finished) -> bytes:
        """The frame for the end of this request."""
        usage = usage_object(event.usage)
        if event.finish_reason is None:
            appended = {
                "type": "appended",
                "request_id": self.request_id,
                "session": event.session,
                "position": event.position,
                "usage": usage,
            }
            scored = {} if event.logprobs is None else {"logprobs": event.logprobs}
            return encode(appended | scored)
        frame = {
            "type": "finished",
            "request_id": self.request_id,
            "session": event.session,
            "seq": event.seq,
            "position": event.position,
            "text": event.text,
            "finish_reason": event.finish_reason,
            "usage": usage,
        }
        return encode({**frame, "error": event.error} if event.error is not None else frame)


def _logprobs(event: TokenEvent) -> bytes:
    """The fields that a token has more, where its request asked for them, and a brace."""
    top = [{"token_id": token, "logprob": logprob} for token, logprob in event.top]
    return encode({"logprob": event.logprob, "top_logprobs": top})[1:]


def created_frame(request_id: str, info: SessionInfo, epoch_name: EpochName) -> bytes:
    """The answer to ``create``."""
    return encode(
        {
            "type": "created",
            "request_id": request_id,
            "session": info.session,
            "epoch": epoch_name(info.epoch),
            "position": info.position,
            "state_bytes": info.state_bytes,
        }
    )


def named_frame(kind: str, request_id: str, **fields: object) -> bytes:
    """An answer of type ``kind`` that has no more to it than its fields."""
    return encode({"type": kind, "request_id": request_id, **fields})


def resumed_frame(request_id: str, resumed: Resumed, epoch_name: EpochName) -> bytes:
    """The answer to ``resume``: the events after it are those that follow ``seq``."""
    info = resumed.info
    fields = {
        "session": info.session,
        "epoch": epoch_name(info.epoch),
        "seq": resumed.first_seq,
        "last_seq": info.seq,
        "position": info.position,
        "busy": info.busy,
    }
    if resumed.reset is None:
        return named_frame("resumed", request_id, **fields)
    return named_frame("reset", request_id, **fields, reason=resumed.reset)


def error_frame(request_id: str | None, error: RequestError) -> bytes:
    """The answer to what cannot be done; ``request_id`` is None where the client gave none."""
    return encode(
        {
            "type": "error",
            "request_id": request_id,
            "status": outcome(error).status,
            "error": error_object(error),
        }
    )


def encode(frame: dict[str, Any]) -> bytes:
    """A frame's JSON."""
    return orjson.dumps(frame)
