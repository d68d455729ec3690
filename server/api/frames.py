"""The server's WebSocket frames as text."""

from __future__ import annotations

from dataclasses import dataclass
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

    def frame(self, event: Event) -> str | None:
        """The frame for an event of this request, if the event has one."""
        if isinstance(event, TokenEvent):
            return self._token(event)
        if isinstance(event, Started):
            return self._started(event)
        return self._finished(event)

    def _token(self, event: TokenEvent) -> str:
        return encode(
            {
                "type": "token",
                "request_id": self.request_id,
                "seq": event.seq,
                "position": event.position,
                "token_id": event.token_id,
                "text": event.text,
            }
        )

    def _started(self, event: Started) -> str | None:
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

    def _finished(self, event: Finished) -> str:
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


def created_frame(request_id: str, info: SessionInfo) -> str:
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


def deleted_frame(request_id: str, session: str) -> str:
    """The answer to ``delete``."""
    return encode({"type": "deleted", "request_id": request_id, "session": session})


def error_frame(request_id: str | None, error: EngineError) -> str:
    """The answer to what cannot be done; ``request_id`` is None where the client gave none."""
    return encode(
        {
            "type": "error",
            "request_id": request_id,
            "status": outcome(error).status,
            "error": error_object(error),
        }
    )


def encode(frame: dict[str, Any]) -> str:
    """A frame's JSON."""
    return orjson.dumps(frame).decode()
