"""`/v1/responses` as a WebSocket: responses one after the other, or beside each other.

A client sends ``response.create`` with the body of `POST /v1/responses`, and gets
the events that HTTP would stream. What has one ``stream_id``, or none, is done in
order. What is not stored can be gone on from on the same socket, for a while: its
text is remembered here, and read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from server.api.auth.keyring import Caller
from server.api.auth.middleware import REVOKED, SUBPROTOCOL
from server.api.direct_write import Write, writer_of
from server.api.errors import error_object, outcome
from server.api.openai.responses.memory import Remembered
from server.api.openai.responses.note import Json
from server.api.openai.responses.schemas import ResponseCreate
from server.api.openai.responses.turns import Turn, history
from server.api.openai.responses.work import (
    FindPrevious,
    Previous,
    Work,
    needs_sessions,
    stored_previous,
    work_of,
)
from server.api.openai.responses.writer import ResponseWriter, on_stream
from server.api.schemas.parse import beside, parse_body
from server.api.websocket.sockets import Sockets
from server.api.websocket.stream_sender import Close
from server.engine.types import Event, Failed, Finished, Migrated, TokenEvent
from server.errors import InternalFailure, InvalidRequest, QueueFull, RequestError, invalid
from server.models.registry import Models
from server.models.service import Service
from server.runtime.event_queue import MAX_IN_FLIGHT, EventQueue, ReaderTooSlow

logger = logging.getLogger("everstream.responses")

#: What is remembered may take as many bytes as so many of the largest messages.
REMEMBERED_MESSAGES = 4


class ResponsesEndpoint:
    """The ASGI application behind the route."""

    def __init__(self, models: Models, sockets: Sockets) -> None:
        self._models, self._sockets = models, sockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope["state"]["caller"]
        offered = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
        await receive()
        await send({"type": "websocket.accept", "subprotocol": offered})
        socket = ResponsesSocket(self._models, caller, receive, send, writer_of(scope))
        self._sockets.add(socket)
        try:
            if not self._models.takes_sockets:
                socket.close(1012, "the server is draining")
            with caller.watched(lambda: socket.close(*REVOKED)):
                await socket.run()
        finally:
            self._sockets.discard(socket)
            socket.ended.set_result(None)


@dataclass(slots=True, eq=False)
class _Live:
    """A response that is being made on a socket."""

    work: Work
    writer: ResponseWriter
    stream_id: str | None
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def frames(self, event: Event) -> list[bytes]:
        if isinstance(event, Failed):
            return [error_frame(event.error, self.stream_id)]
        return [on_stream(written, self.stream_id) for written in self.writer.write(event)]


class ResponsesSocket:
    """One socket. ``ended`` is done when nothing more is sent on it."""

    def __init__(
        self, models: Models, caller: Caller, receive: Receive, send: Send, write: Write
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._models, self._caller = models, caller
        self._owner = caller.tenant.name
        self._receive, self._send, self._write = receive, send, write
        self._max_ids = models.default.limits.max_prompt_tokens
        self._max_requests = models.default.max_socket_requests
        self._event_queue: EventQueue[Event | bytes | Close] = EventQueue(
            models.default.max_queued_events, self._press, MAX_IN_FLIGHT
        )
        self._services: set[Service] = set()
        self._max_waiting_bytes = models.default.max_message_bytes
        self._num_waiting_bytes = 0
        self._lanes: dict[str | None, deque[bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._live: dict[str, _Live] = {}
        self._remembered = Remembered(REMEMBERED_MESSAGES * models.default.max_message_bytes)

    async def run(self) -> None:
        """Serves the socket until either side closes it; then ends what still runs."""
        reader = asyncio.create_task(self._read())
        sender = asyncio.create_task(self._send_all())
        try:
            watched: set[asyncio.Future[Any]] = {reader, sender, self._event_queue.broken}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for id, live in self._live.items():
                live.work.service.async_engine.cancel(id)
            for service in self._services:
                service.async_engine.release(self._event_queue)
            await _stop(reader, sender, *self._tasks)
        if self._event_queue.broken.done():
            await self._send_close(_reason(self._event_queue.broken.result()))

    def close(self, code: int, reason: str) -> None:
        """Closes the socket after everything that waits in its event queue."""
        self._event_queue.put([Close(code, reason)])

    def _press(self, full: bool) -> None:
        """A client that does not keep up costs nothing: what it asked for parks."""
        for service in self._services:
            (service.async_engine.hold if full else service.async_engine.go_on)(self._event_queue)

    # Client to server

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            await self._take(message.get("text"))

    async def _take(self, text: str | None) -> None:
        """Counts a message before it is looked at, and keeps its bytes until its turn."""
        stream_id = None
        try:
            self._caller.request("generate")
            if text is None:
                raise InvalidRequest("frames must be text")
            body = text.encode()
            is_create, stream_id = await beside(len(body), lambda: _head(body))
            if not is_create:
                raise invalid("type", "must be response.create; there is no other message")
            if sum(map(len, self._lanes.values())) >= self._max_requests:
                raise QueueFull("too many responses on this socket")
            if self._num_waiting_bytes + len(body) > self._max_waiting_bytes:
                raise QueueFull("too many bytes wait on this socket")
        except RequestError as error:
            self._event_queue.put([error_frame(error, stream_id)])
            return
        self._num_waiting_bytes += len(body)
        lane = self._lanes.get(stream_id)
        if lane is not None:
            lane.append(body)
            return
        self._lanes[stream_id] = deque([body])
        task = asyncio.create_task(self._work_off(stream_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work_off(self, stream_id: str | None) -> None:
        """All that is asked for on one stream, in its order."""
        lane = self._lanes[stream_id]
        while lane:
            try:
                body, lane[0] = lane[0], b""
                await self._respond(body, stream_id)
            except RequestError as error:
                self._event_queue.put([error_frame(error, stream_id)])
            except Exception:  # ours; what else is asked for goes on
                logger.exception("a response failed")
                failure = InternalFailure("the server failed; it has logged why")
                self._event_queue.put([error_frame(failure, stream_id)])
            lane.popleft()
        del self._lanes[stream_id]

    async def _respond(self, body: bytes, stream_id: str | None) -> None:
        with contextlib.ExitStack() as held:
            work = await self._work(body, held)
            live = self._begin(work, stream_id)
            try:
                live.work = await work.begin(self._event_queue)
                await live.done
            finally:
                self._live.pop(work.request.request_id, None)
                await live.work.end()
        if not work.is_stored and live.writer.is_over:
            await self._remember(live)

    async def _work(self, body: bytes, held: contextlib.ExitStack) -> Work:
        """What a message asks for; ``held`` keeps its model, which may be replaced meanwhile.

        Its bytes wait until it is prepared: parsed, they take many times their number.
        """
        try:
            message = await beside(
                len(body), lambda: parse_body(ResponseCreate, body, self._max_ids)
            )
            self._caller.require("generate")
            if needs_sessions(message):
                self._caller.require("sessions")
            name = message.model
            service = self._models.default if name is None else self._models.service(name)
            held.enter_context(service.async_engine.use())
            return await work_of(service, self._owner, message, self._find_previous(service))
        finally:
            self._num_waiting_bytes -= len(body)

    def _begin(self, work: Work, stream_id: str | None) -> _Live:
        self._services.add(work.service)
        live = self._live[work.request.request_id] = _Live(work, work.writer(), stream_id)
        return live

    # What is not stored

    def _find_previous(self, service: Service) -> FindPrevious:
        """Among what this socket remembers, then in the store."""
        find_stored = stored_previous(service, self._owner)

        async def find_previous(id: str) -> Previous:
            if (turn := self._remembered.find(id)) is not None:
                return Previous(turn, None)
            return await find_stored(id)

        return find_previous

    async def _remember(self, live: _Live) -> None:
        """The whole conversation, so that nothing before it is needed."""
        find_previous = self._find_previous(live.work.service)

        async def find_turn(id: str) -> Turn:
            return (await find_previous(id)).turn

        async def output() -> list[Json]:
            written: list[Json] = live.writer.response()["output"]
            return written

        note = live.work.note
        with contextlib.suppress(InvalidRequest):  # what it went on from is gone meanwhile
            items = await history(find_turn, Turn(note, output))
            fields = {**note.fields, "previous_response_id": None}
            self._remembered.keep(replace(note, fields=fields, items=items))

    # Server to client

    async def _send_all(self) -> None:
        with contextlib.suppress(OSError, RequestError):
            while True:
                frames: list[bytes] = []
                for item in await self._event_queue.take(self._send_now):
                    if isinstance(item, Close):
                        await self._send_frames(frames)
                        await self._send_close(item)
                        return
                    frames += self._frames(item)
                await self._send_frames(frames)

    def _send_now(self, items: Sequence[Event | bytes | Close]) -> bool:
        """The direct write for tokens, which are nearly all there is."""
        # The writer counts what it writes: it must not write the same twice.
        if not all(isinstance(item, TokenEvent) for item in items) or not self._write([]):
            return False
        return self._write([frame for item in items for frame in self._frames(item)])

    async def _send_frames(self, frames: list[bytes]) -> None:
        if self._write(frames):
            return
        for frame in frames:
            await self._send({"type": "websocket.send", "text": frame.decode()})

    def _frames(self, item: Event | bytes | Close) -> list[bytes]:
        if isinstance(item, bytes):
            return [item]
        live = None if isinstance(item, Close) else self._live.get(item.request_id)
        if live is None or isinstance(item, Close):
            return []
        frames = live.frames(item)
        if isinstance(item, Finished | Failed | Migrated) and not live.done.done():
            live.done.set_result(None)
        return frames

    async def _send_close(self, close: Close) -> None:
        message = {"type": "websocket.close", "code": close.code, "reason": close.reason}
        with contextlib.suppress(OSError, RuntimeError):  # the client may have closed first
            await self._send(message)


def error_frame(error: RequestError, stream_id: str | None = None) -> bytes:
    """The event for what cannot be done."""
    status = outcome(error).status
    frame = {"type": "error", "status": status, "error": error_object(error)}
    return on_stream(orjson.dumps(frame), stream_id)


def _head(body: bytes) -> tuple[bool, str | None]:
    """Whether a message may be a ``response.create``, and its stream; it may be wrong in any way.

    What else it has is forgotten: parsed, it takes many times its bytes.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return True, None
    if not isinstance(value, dict):
        return True, None
    stream_id = value.get("stream_id")
    is_create = value.get("type", "response.create") == "response.create"
    return is_create, stream_id if isinstance(stream_id, str) else None


def _reason(error: RequestError) -> Close:
    if isinstance(error, ReaderTooSlow):
        return Close(1008, "the client reads too slowly")
    return Close(1011, "the engine has stopped")


async def _stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(end, Exception):
            raise end
