"""The server's WebSocket frames as JSON in UTF-8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson

from server.api.completion import usage_object
from server.api.errors import error_object, outcome
from server.api.schemas.frame_models import (
    AnyFrame,
    AppendedFrame,
    CreatedFrame,
    ErrorFrame,
    FinishedFrame,
    MigrateFrame,
    ResetFrame,
    ResumedFrame,
    SessionFrame,
    StartedFrame,
)
from server.api.schemas.responses import Forked, SessionCreated
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
    """Writes the frames of a live request of a socket, under the client's name for it.

    ``request`` is None where it was resumed: it has started long ago.
    """

    request_id: str
    request: Request | None
    epoch_name: EpochName
    _before: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Writes what all of its tokens' frames begin with."""
        head = orjson.dumps({"type": "token", "request_id": self.request_id})
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
        """The `TokenFrame` for one token of this request.

        It is put together from bytes: orjson reserves a kilobyte for each result, which
        costs three times as much where a batch of many frames is held until it is written.
        """
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
        seed = self.request.sampling.seed
        frame: StartedFrame = {"type": "started", **self._place(event), "seed": seed}
        return encode(frame)

    def _migrate(self, event: Migrated) -> bytes:
        frame: MigrateFrame = {"type": "migrate", **self._place(event)}
        return encode(frame)

    def _place(self, event: Started | Migrated) -> SessionFrame:
        return {
            "request_id": self.request_id,
            "session": event.session,
            "epoch": self.epoch_name(event.epoch),
            "seq": event.seq,
            "position": event.position,
        }

    def finished(self, event: Finished) -> bytes:
        """The frame for the end of this request."""
        if event.finish_reason is None:
            return self._appended(event)
        frame: FinishedFrame = {
            "type": "finished",
            "request_id": self.request_id,
            "session": event.session,
            "seq": event.seq,
            "position": event.position,
            "text": event.text,
            "finish_reason": event.finish_reason,
            "usage": usage_object(event.usage),
        }
        if event.prefix is not None:
            frame["prefix"] = event.prefix
        if event.error is not None:
            frame["error"] = event.error
        return encode(frame)

    def _appended(self, event: Finished) -> bytes:
        frame: AppendedFrame = {
            "type": "appended",
            "request_id": self.request_id,
            "session": event.session,
            "position": event.position,
            "usage": usage_object(event.usage),
        }
        if event.logprobs is not None:
            frame["logprobs"] = event.logprobs
        return encode(frame)


def _logprobs(event: TokenEvent) -> bytes:
    """The fields that a token has more, where its request asked for them, and a brace."""
    top = [{"token_id": token, "logprob": logprob} for token, logprob in event.top]
    return orjson.dumps({"logprob": event.logprob, "top_logprobs": top})[1:]


def created_frame(request_id: str, info: SessionInfo, epoch_name: EpochName) -> bytes:
    """The answer to ``create``."""
    frame: CreatedFrame = {
        "type": "created",
        "request_id": request_id,
        **created(info, epoch_name),
    }
    return encode(frame)


def created(info: SessionInfo, epoch_name: EpochName) -> SessionCreated:
    """A new session, over HTTP and WebSocket."""
    return {
        "session": info.session,
        "epoch": epoch_name(info.epoch),
        "position": info.position,
        "state_bytes": info.state_bytes,
    }


def forked(session: str, forks: Sequence[SessionInfo], epoch_name: EpochName) -> Forked:
    """The copies of ``session``, over HTTP and WebSocket."""
    return {
        "session": session,
        "sessions": [fork.session for fork in forks],
        "epoch": epoch_name(forks[0].epoch),
        "position": forks[0].position,
    }


def resumed_frame(request_id: str, resumed: Resumed, epoch_name: EpochName) -> bytes:
    """The answer to ``resume``: the events after it are those that follow ``seq``."""
    info = resumed.info
    frame: ResumedFrame = {
        "type": "resumed",
        "request_id": request_id,
        "session": info.session,
        "epoch": epoch_name(info.epoch),
        "seq": resumed.first_seq,
        "last_seq": info.seq,
        "position": info.position,
        "busy": info.busy,
    }
    if resumed.reset is None:
        return encode(frame)
    reset: ResetFrame = {**frame, "type": "reset", "reason": resumed.reset}
    return encode(reset)


def error_frame(request_id: str | None, error: RequestError) -> bytes:
    """The answer to what cannot be done; ``request_id`` is None where the client gave none."""
    frame: ErrorFrame = {
        "type": "error",
        "request_id": request_id,
        "status": outcome(error).status,
        "error": error_object(error),
    }
    return encode(frame)


def encode(frame: AnyFrame) -> bytes:
    """A frame's JSON. It has the fields in the order in which they were put."""
    return orjson.dumps(frame)
