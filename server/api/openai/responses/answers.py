"""The answers to `POST /v1/responses` and to reading one again: whole, or as server-sent events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence

import orjson
from starlette.types import Receive, Scope, Send

from server.api.errors import SessionMigrated
from server.api.openai.responses.preparing import PreparedResponse
from server.api.openai.responses.reading import StoredResponse
from server.api.openai.responses.writer import SILENT, ResponseWriter, sse
from server.api.streaming import COMMENT_BETWEEN_IDS, DirectWriter, send_stream, send_whole
from server.api.watched import ENDS, WatchedAnswer
from server.engine.types import Event, Failed, Finished, Migrated, Started
from server.errors import RequestError
from server.models.service import Service
from server.runtime.event_queue import EventQueue
from server.sessions.idempotency import NO_MORE
from server.sessions.resume import Cursor
from server.store.errors import HistoryGone

#: So many are not written in the event loop.
MANY_EVENTS = 64


class ResponseAnswer(WatchedAnswer):
    """Writes what comes to its event queue until the response has ended."""

    comment = COMMENT_BETWEEN_IDS

    def __init__(self, service: Service, owner: str, writer: ResponseWriter, streams: bool) -> None:
        super().__init__(service)
        self._large, self._owner = service.large_answers, owner
        self._writer, self._streams = writer, streams

    def _encode(self, events: Sequence[Event]) -> list[bytes]:
        return [sse(written) for event in events for written in self._writer.write(event)]

    def _error(self, error: RequestError) -> bytes:
        return sse(self._writer.error(error))

    async def _answer(self, scope: Scope, send: Send) -> None:
        with self._large.reserve(self._owner, self._writer.note.num_bytes):
            if self._streams:
                await self._stream(scope, send)
            else:
                await self._begin()
                await send_whole(send, [await self._whole(await self._first_events())])

    async def _stream(self, scope: Scope, send: Send) -> None:
        direct = self._direct_writer(scope, self._encode)
        with direct:
            await self._begin()
            pieces = self._pieces(await self._first_events(), direct)
            await send_stream(send, pieces, self._error)

    async def _begin(self) -> None:
        """Raises the `RequestError` that is still a plain HTTP error."""
        raise NotImplementedError

    async def _first_events(self) -> list[Event]:
        """What there is to write first, if not a comment; nothing has been sent before."""
        events = await self._event_queue.take()
        for event in events:
            if isinstance(event, Failed):
                raise event.error
        return events

    async def _missed(self) -> list[Event]:
        """More of what is not to come through the event queue; nothing at the end."""
        return []

    async def _whole(self, events: list[Event]) -> bytes:
        while True:
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Migrated):
                    raise SessionMigrated
            await self._chunk(events)
            if isinstance(events[-1], ENDS):
                return await self._large.run(lambda: orjson.dumps(self._writer.response()))
            events = await self._missed() or await self._event_queue.take(self._take_in)

    async def _pieces(
        self, events: list[Event], direct: DirectWriter[Event]
    ) -> AsyncGenerator[bytes, None]:
        yield await self._chunk(events) if events else self.comment
        while not (events and isinstance(events[-1], ENDS)):
            events = await self._missed()
            while not events:
                refused, events = await direct.take()
                yield b"".join(refused)
            yield await self._chunk(events)

    async def _chunk(self, events: Sequence[Event]) -> bytes:
        """What is streamed for ``events``; written in a thread where there are many, or the whole.

        Both the start and the end repeat what was asked for.
        """
        is_part = not isinstance(events[0], Started) and not isinstance(events[-1], Finished)
        if len(events) < MANY_EVENTS and is_part:
            return b"".join(self._encode(events))
        return await self._large.run(lambda: b"".join(self._encode(events)))

    def _take_in(self, events: Sequence[Event]) -> bool:
        """Without waking the reader, unless it is an end."""
        if isinstance(events[-1], ENDS):
            return False
        for event in events:
            self._writer.write(event)
        return True


class NewResponse(ResponseAnswer):
    """Makes a response. It ends when the client leaves, unless it is one in the background."""

    def __init__(self, prepared: PreparedResponse, streams: bool) -> None:
        writer = prepared.writer(-1 if streams else SILENT)
        super().__init__(prepared.service, prepared.request.owner, writer, streams)
        self._made = prepared
        self._was_refused = False  # what runs under its name then is another's

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            is_done = self._writer.is_over or self._was_refused
            if not is_done and not self._made.is_in_background:
                self._async_engine.requests.cancel(self._made.request.request_id)
            await self._made.end()

    async def _begin(self) -> None:
        try:
            self._made = await self._made.begin(self._event_queue)
        except RequestError:
            self._was_refused = True
            raise


class ReplayedResponse(ResponseAnswer):
    """Tells a response again, and continues with what comes.

    It takes what runs from the reader that it has: a connection that is gone is
    not always seen to be.
    """

    def __init__(self, kept: StoredResponse, streams: bool, after: int = -1) -> None:
        writer = kept.writer(after if streams else SILENT)
        super().__init__(kept.service, kept.owner, writer, streams)
        self._kept = kept
        self._id = f"{kept.note.id}-{secrets.token_hex(8)}"
        self._seq = self._last_seq = kept.keyed.first_seq
        self._is_live = False

    async def _begin(self) -> None:
        end, keyed = self._kept.keyed.finished, self._kept.keyed
        if end is not None:
            self._last_seq = end.seq
            return
        resumed = await self._sessions.resume(
            keyed.session,
            self._kept.owner,
            Cursor(keyed.first_seq),
            self._id,
            self._event_queue,
            take_over=True,
        )
        if resumed.reset is not None:
            raise HistoryGone(NO_MORE)
        self._last_seq, self._is_live = resumed.info.seq, resumed.info.busy

    async def _first_events(self) -> list[Event]:
        return [self._kept.started(), *await self._missed()]

    async def _missed(self) -> list[Event]:
        if self._seq < self._last_seq:
            events: list[Event] = [*await self._kept.events(self._seq)]
            if not events:
                raise HistoryGone(NO_MORE)
            events = [e for e in events if e.seq <= self._last_seq]  # type: ignore[union-attr]
            self._seq = events[-1].seq  # type: ignore[union-attr]
            return events
        if self._is_live:
            self._is_live = False
            self._async_engine.requests.caught_up(self._id)
        return []


async def in_background(prepared: PreparedResponse) -> bytes:
    """Begins ``prepared`` without a reader; returns the response as it is then."""
    sink: EventQueue[Event] = EventQueue(prepared.service.max_queued_events)
    begun = await prepared.begin(sink)
    prepared.service.async_engine.requests.release(sink)
    return orjson.dumps(begun.writer().response())
