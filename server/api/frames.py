"""The server's WebSocket frames as JSON in UTF-8."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from server.api.errors import error_object, outcome
from server.api.translate import usage_object
from server.engine.errors import EngineError
from server.engine.types import Event, Finished, Request, SessionInfo, Started, TokenEvent


@dataclass(frozen=True, slots=True)
class Work:
    """A live request of a socket, under the client's name for it."""

    request_id: str
    request: Request
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
        return self._finished(event)

    def token(self, event: TokenEvent) -> bytes:
        """The frame for one token of this request."""
        return b'%b,"seq":%d,"position":%d,"token_id":%d,"text":%b}' % (
            self._before,
            event.seq,
            event.position,
            event.token_id,
            orjson.dumps(event.text),
        )

    def _started(self, event: Started) -> bytes | None:
        if self.request.sampling is None:
            return None
        return encode(
            {
                "type": "started",
                "request_id": self.request_id,
                "session": event.session,
                "position": event.position,
                "seed": self.request.sampling.seed,
            }
        )

    def _finished(self, event: Finished) -> bytes:
        usage = usage_object(event.usage)
        if event.finish_reason is None:
            return encode(
                {
                    "type": "appended",
                    "request_id": self.request_id,
                    "session": event.session,
                    "position": event.position,
                    "usage": usage,
                }
            )
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


def created_frame(request_id: str, info: SessionInfo) -> bytes:
    """The answer to ``create``."""
    return encode(
        {
            "type": "created",
            "request_id": request_id,
            "session": info.session,
            "position": info.position,
            "state_bytes": info.state_bytes,
        }
    )


def deleted_frame(request_id: str, session: str) -> bytes:
    """The answer to ``delete``."""
    return encode({"type": "deleted", "request_id": request_id, "session": session})


def error_frame(request_id: str | None, error: EngineError) -> bytes:
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
