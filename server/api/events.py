"""A session's events on the wire: as frames of JSON, and over SSE from a cursor on."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import orjson
from starlette.types import Scope, Send

from server.api.answers import (
    COMMENT_BETWEEN_IDS,
    ENDS,
    DirectWriter,
    WatchedAnswer,
    send_no_more,
    send_stream,
    server_sent,
    usage_object,
)
from server.api.errors import error_object, outcome
from server.api.schemas.responses import (
    AnyFrame,
    AppendedFrame,
    CreatedFrame,
    ErrorFrame,
    FinishedFrame,
    Forked,
    MigrateFrame,
    ResetFrame,
    ResumedFrame,
    SessionCreated,
    SessionFrame,
    StartedFrame,
)
from server.api.schemas.wire import MAX_EPOCH_CHARS, EventsQuery, has_control
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
from server.errors import InvalidRequest, RequestError, invalid
from server.models.service import Service
from server.sessions.loader import Cursor, Resumed

# -------------------------------------------------------------------------------------------------
# The server's WebSocket frames as JSON in UTF-8.


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


# -------------------------------------------------------------------------------------------------
# A session's events over SSE, from a cursor on: what was missed, then what comes.


def cursor_of(last_event_id: str | None, query: EventsQuery) -> Cursor:
    """The place that a client has reached; the header, which a browser sends, goes first.

    Raises `InvalidRequest` that names what cannot be one.
    """
    if last_event_id:
        name, _, seq = last_event_id.rpartition(":")
        if len(name) > MAX_EPOCH_CHARS or has_control(name):
            raise _unknown_id()
        return Cursor(number_of(seq), name or None)
    return Cursor(query.starting_after or 0, query.epoch)


def number_of(id: str) -> int:
    """The number that is the last part of an event's id, or all of it. Raises `InvalidRequest`."""
    if not (id.isascii() and id.isdigit() and len(id) <= 16):
        raise _unknown_id()
    return int(id)


def _unknown_id() -> InvalidRequest:
    return invalid("Last-Event-ID", "must be an id that this server has sent")


class EventsAnswer(WatchedAnswer):
    """The frames of ``/v1/stream`` as server-sent events; ends when the session is idle.

    A browser's `EventSource` then calls ``again``, with the last id, until it gets 204: where
    nothing comes after ``cursor``.
    """

    comment = COMMENT_BETWEEN_IDS

    def __init__(
        self,
        service: Service,
        session: str,
        owner: str,
        cursor: Cursor,
        take_over: bool,
        again: bool,
    ) -> None:
        super().__init__(service)
        self._session, self._owner = session, owner
        self._cursor, self._take_over, self._again = cursor, take_over, again
        self._id, self._epoch = f"evt-{secrets.token_hex(16)}", b""

    async def _answer(self, scope: Scope, send: Send) -> None:
        resumed = await self._sessions.resume(
            self._session,
            self._owner,
            self._cursor,
            self._id,
            self._event_queue,
            self._take_over,
        )
        has_more = resumed.info.busy or resumed.first_seq < resumed.info.seq
        if self._again and not has_more and resumed.reset is None:
            await send_no_more(send)
            return
        self._epoch = self._async_engine.epoch_name(resumed.info.epoch).encode()
        self._frames = FrameWriter(self._id, None, self._async_engine.epoch_name)
        direct = self._direct_writer(scope, self._encode)
        with direct:
            await send_stream(send, self._pieces(resumed, direct), self._error)

    async def _pieces(
        self, resumed: Resumed, direct: DirectWriter[Event]
    ) -> AsyncGenerator[bytes, None]:
        """What was missed, then what comes while the session runs."""
        epoch_name = self._async_engine.epoch_name
        place = b"%b:%d" % (self._epoch, resumed.first_seq)
        yield server_sent(resumed_frame(self._id, resumed, epoch_name), id=place)
        async for missed in self._sessions.missed(self._owner, resumed, self._id):
            yield b"".join(self._encode(missed))
        if not resumed.info.busy:
            return
        self._async_engine.requests.caught_up(self._id)
        events: Sequence[Event] = ()
        while not events or not isinstance(events[-1], ENDS):
            refused, events = await direct.take()
            yield b"".join([*refused, *self._encode(events)])

    def _encode(self, events: Sequence[Event]) -> list[bytes]:
        """Each event as its frame, if it has one; those that count have their place as an id."""
        return [
            server_sent(frame, id=self._place(event))
            for event in events
            if (frame := self._frames.frame(event)) is not None
        ]

    def _place(self, event: Event) -> bytes | None:
        if not isinstance(event, TokenEvent | Finished):
            return None
        return b"%b:%d" % (self._epoch, event.seq)

    def _error(self, error: RequestError) -> bytes:
        return server_sent(error_frame(self._id, error))
