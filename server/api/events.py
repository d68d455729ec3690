"""A session's events over SSE, from a cursor on: what was missed, then what comes."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence

from starlette.types import Scope, Send

from server.api.frames import FrameWriter, error_frame, resumed_frame
from server.api.schemas.names import MAX_EPOCH_CHARS, has_control
from server.api.schemas.queries import EventsQuery
from server.api.streaming import (
    COMMENT_BETWEEN_IDS,
    DirectWriter,
    send_no_more,
    send_stream,
    server_sent,
)
from server.api.watched import ENDS, WatchedAnswer
from server.engine.types import Event, Finished, TokenEvent
from server.errors import InvalidRequest, RequestError, invalid
from server.models.service import Service
from server.sessions.resume import Cursor, Resumed


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
