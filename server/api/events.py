"""A session's events over SSE, from a cursor on: what was missed, then what comes."""

from __future__ import annotations

import secrets

from starlette.types import Receive, Scope, Send

from server.api.middleware.refuse import error_response
from server.api.schemas.frames import FrameWriter, error_frame, resumed_frame
from server.api.schemas.names import MAX_EPOCH_CHARS, has_control
from server.api.schemas.queries import EventsQuery
from server.api.watched import WatchedAnswer, send_part, start_stream
from server.engine.types import Event, Failed, Finished, Migrated, TokenEvent
from server.errors import RequestError, invalid
from server.models.service import Service
from server.sessions.resume import Cursor, Resumed


def cursor_of(last_event_id: str | None, query: EventsQuery) -> Cursor:
    """The place that a client has reached; the header, which a browser sends, goes first.

    Raises `InvalidRequest` that names what cannot be one.
    """
    if last_event_id:
        name, _, seq = last_event_id.rpartition(":")
        is_seq = seq.isascii() and seq.isdigit() and len(seq) <= 16
        if not is_seq or len(name) > MAX_EPOCH_CHARS or has_control(name):
            raise invalid("Last-Event-ID", "must be an id that this server has sent")
        return Cursor(int(seq), name or None)
    return Cursor(query.starting_after or 0, query.epoch)


class EventsAnswer(WatchedAnswer):
    """The frames of ``/v1/stream`` as server-sent events; ends when the session is idle."""

    def __init__(
        self, service: Service, session: str, owner: str, cursor: Cursor, take_over: bool
    ) -> None:
        super().__init__(service)
        self._session, self._owner = session, owner
        self._cursor, self._take_over = cursor, take_over
        self._id = f"evt-{secrets.token_hex(16)}"
        self._frames = FrameWriter(self._id, None, service.async_engine.epoch_name)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            resumed = await self._sessions.resume(
                self._session,
                self._owner,
                self._cursor,
                self._id,
                self._event_queue,
                self._take_over,
            )
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        await start_stream(send)
        epoch_name = self._async_engine.epoch_name
        await send_part(send, _data(resumed_frame(self._id, resumed, epoch_name)))
        try:
            await self._send_missed(resumed, send)
            if resumed.info.busy:
                self._async_engine.caught_up(self._id)
                await self._send_live(resumed, send)
        except RequestError as error:
            await send_part(send, _data(error_frame(self._id, error)))
        await send({"type": "http.response.body", "body": b""})

    async def _send_missed(self, resumed: Resumed, send: Send) -> None:
        async for events in self._sessions.missed(self._owner, resumed, self._id):
            await send_part(send, b"".join(self._event(e, resumed) for e in events))

    async def _send_live(self, resumed: Resumed, send: Send) -> None:
        while True:
            events = await self._event_queue.take()
            await send_part(send, b"".join(self._event(event, resumed) for event in events))
            if isinstance(events[-1], Finished | Migrated | Failed):
                return

    def _event(self, event: Event, resumed: Resumed) -> bytes:
        frame = self._frames.frame(event)
        if frame is None:
            return b""
        if not isinstance(event, TokenEvent | Finished):
            return _data(frame)
        epoch = self._async_engine.epoch_name(resumed.info.epoch).encode()
        return b"id: %b:%d\n%b" % (epoch, event.seq, _data(frame))


def _data(frame: bytes) -> bytes:
    return b"data: %b\n\n" % frame
