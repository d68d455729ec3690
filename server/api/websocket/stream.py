"""`/v1/stream`: many generations over one socket, one reader and one sender task.

The reader always reads, so that pings, pongs and cancels get through whatever
the sender does. Everything to the client goes through one bounded event queue, in
order; when it fills, the socket's requests park until the client has read. While
the event queue is empty and the client reads, tokens take the direct write and wake nobody.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from server.api.auth.keyring import Caller
from server.api.auth.middleware import REVOKED, SUBPROTOCOL
from server.api.auth.scopes import MESSAGES
from server.api.auth.tenants import RateLimited
from server.api.direct_write import Write, writer_of
from server.api.schemas import requests as schemas
from server.api.schemas.frames import Work, error_frame, named_frame, resumed_frame
from server.api.schemas.parse import beside, named_in, parse_message, request_id_of
from server.api.translate import Translator
from server.api.websocket import session_messages
from server.api.websocket.sockets import Sockets
from server.api.websocket.stream_sender import Alive, Close, Sender
from server.engine.types import Event, Request
from server.errors import InternalFailure, InvalidRequest, QueueFull, RequestError, invalid
from server.models.registry import Models
from server.models.service import Service
from server.runtime.async_engine import AsyncEngine
from server.runtime.event_queue import MAX_IN_FLIGHT, EventQueue, ReaderTooSlow
from server.sessions.idempotency import KeyInUse
from server.sessions.resume import Cursor, Resumed
from server.store.base import Keyed

logger = logging.getLogger("everstream.stream")

#: A frame over the rate limit is read up to this size: a cancel has less.
MAX_EXCESS_CHARS = 1024


class StreamEndpoint:
    """The ASGI application behind the route."""

    def __init__(self, models: Models, sockets: Sockets) -> None:
        self._models, self._sockets = models, sockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope["state"]["caller"]
        offered = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
        await receive()
        await send({"type": "websocket.accept", "subprotocol": offered})
        stream = Stream(self._models, caller, receive, send, writer_of(scope))
        self._sockets.add(stream)
        try:
            if not self._models.takes_sockets:
                stream.close(1012, "the server is draining")
            with caller.watched(lambda: stream.close(*REVOKED)):
                await stream.run()
        finally:
            self._sockets.discard(stream)
            stream.ended.set_result(None)


class Stream:
    """One socket. ``ended`` is done when nothing more is sent on it."""

    def __init__(
        self, models: Models, caller: Caller, receive: Receive, send: Send, write: Write
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._models = models
        self._used: set[AsyncEngine] = set()
        self._max_ids = models.default.limits.max_prompt_tokens
        self._max_requests = models.default.max_socket_requests
        self._caller = caller
        self._owner = caller.tenant.name
        self._receive = receive
        self._event_queue: EventQueue[Event | bytes | Close] = EventQueue(
            models.default.max_queued_events, self._press, MAX_IN_FLIGHT
        )
        self._resuming: set[asyncio.Task[None]] = set()
        self._prefix = secrets.token_hex(8)
        self._num_begun = 0
        self._alive: dict[str, Alive] = {}  # by the engine's names
        self._sender = Sender(self._event_queue, self._alive, self._end, send, write)
        self._ids: dict[str, str] = {}  # the engine's names by the client's

    async def run(self) -> None:
        """Serves the socket until either side closes it; then cancels what still runs."""
        reader = asyncio.create_task(self._read())
        sender = asyncio.create_task(self._sender.run())
        try:
            watched: set[asyncio.Future[Any]] = {reader, sender, self._event_queue.broken}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for async_engine in self._used:
                async_engine.release(self._event_queue)
            await _stop(reader, sender, *self._resuming)
        if self._event_queue.broken.done():
            await self._sender.close(_reason(self._event_queue.broken.result()))

    def close(self, code: int, reason: str) -> None:
        """Closes the socket after everything that waits in its event queue."""
        self._event_queue.put([Close(code, reason)])

    def _press(self, full: bool) -> None:
        """A client that does not keep up costs nothing: what it asked for parks."""
        for async_engine in self._used:
            (async_engine.hold if full else async_engine.go_on)(self._event_queue)

    # Client to server

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            await self._handle(message.get("text"))

    async def _handle(self, text: str | None) -> None:
        """Counts a frame before it is parsed; what is over the limit is parsed only if short."""
        excess: RateLimited | None = None
        try:
            self._caller.tenant.request()
        except RateLimited as error:
            excess = error
            if text is None or len(text) > MAX_EXCESS_CHARS:
                self._event_queue.put([error_frame(named_in(text or ""), error)])
                return
        if text is None:
            self._event_queue.put([error_frame(None, InvalidRequest("frames must be text"))])
            return
        try:
            message = await beside(len(text), lambda: parse_message(text, self._max_ids))
        except InvalidRequest as error:
            id = await beside(len(text), lambda: request_id_of(text))
            self._event_queue.put([error_frame(id, excess or error)])
            return
        try:
            self._check_excess(message, excess)
            await self._obey(message)
        except RequestError as error:
            self._event_queue.put([error_frame(message.request_id, error)])
        except Exception:  # ours; what else the socket does goes on
            logger.exception("a message failed")
            failure = InternalFailure("the server failed; it has logged why")
            self._event_queue.put([error_frame(message.request_id, failure)])

    def _check_excess(self, message: schemas.Message, excess: RateLimited | None) -> None:
        """Raises it for all but what gives something back, which is counted all the same."""
        if excess is None:
            return
        if MESSAGES[message.type] is not None:
            raise excess
        self._caller.tenant.count()

    async def _obey(self, message: schemas.Message) -> None:
        if (wanted := MESSAGES[message.type]) is not None:
            self._caller.require(wanted)
        if isinstance(message, schemas.Cancel):
            # Without effect on what is not alive: its last frame was the answer.
            if (id := self._ids.get(message.request_id)) is not None:
                self._alive[id].cancelled = True
                self._alive[id].async_engine.cancel(id)
        elif isinstance(message, schemas.Detach):
            self._detach(message)
        elif isinstance(message, schemas.Resume):
            self._check_free(message.request_id)
            await self._resume(message)
        elif isinstance(message, schemas.Generate | schemas.Append):
            await self._start(message)
        elif isinstance(message, schemas.Create):
            service = self._of_model(message.model)
            with service.async_engine.use():
                frame = await session_messages.create(service, message, self._owner)
            self._event_queue.put([frame])
        else:
            service = await self._models.holding(message.session, self._owner)
            with service.async_engine.use():
                frame = await session_messages.answer(service, message, self._owner)
            self._event_queue.put([frame])

    def _of_model(self, name: str | None) -> Service:
        return self._models.default if name is None else self._models.service(name)

    async def _service_for(self, message: schemas.Generate | schemas.Append) -> Service:
        """Where the message's session is, or its model."""
        if message.session is None:
            return self._of_model(message.model)
        model = message.model if isinstance(message, schemas.Generate) else None
        return await self._models.holding(message.session, self._owner, model)

    def _check_free(self, request_id: str) -> None:
        if request_id in self._ids:
            raise invalid("request_id", "names a live request of this socket")
        if len(self._alive) >= self._max_requests:
            raise QueueFull("too many requests on this socket")

    async def _start(self, message: schemas.Generate | schemas.Append) -> None:
        self._check_free(message.request_id)
        service = await self._service_for(message)
        with service.async_engine.use():  # it may be replaced meanwhile
            request = await self._translate(service, message)
            self._begin(request.request_id, message.request_id, service, request)
            found: Keyed | None = None
            try:
                if request.key is None:
                    await service.sessions.submit(request, self._event_queue)
                else:
                    found = await service.keys.submit_once(request, self._event_queue)
            except RequestError:
                self._end(request.request_id)
                raise
        if found is not None:
            self._repeat(service, request.request_id, found)

    def _repeat(self, service: Service, id: str, found: Keyed) -> None:
        """Answers again what has been done under the same key."""
        if not found.is_append:
            self._catch_up_beside(
                id, lambda: service.keys.resume(self._owner, found, id, self._event_queue)
            )
            return
        work = self._end(id)
        if found.finished is None:
            raise KeyInUse
        self._event_queue.put([work.finished(found.finished)])

    def _new_id(self, request_id: str) -> str:
        """The engine's name: a request that was left may still be there under the client's."""
        self._num_begun += 1
        return f"{self._prefix}-{self._num_begun}-{request_id}"

    def _begin(self, id: str, request_id: str, service: Service, request: Request | None) -> None:
        self._used.add(service.async_engine)
        self._ids[request_id] = id
        work = Work(request_id, request, service.async_engine.epoch_name)
        self._alive[id] = Alive(work, service)

    def _end(self, id: str) -> Work:
        work = self._alive.pop(id).work
        del self._ids[work.request_id]
        return work

    async def _translate(
        self, service: Service, message: schemas.Generate | schemas.Append
    ) -> Request:
        translator = Translator.of(service)
        id = self._new_id(message.request_id)
        if isinstance(message, schemas.Append):
            return await translator.append(id, self._owner, message.session, message)
        if message.session is not None or message.keep:
            self._caller.require("sessions")
        return await translator.generate(id, self._owner, message, message)

    def _detach(self, message: schemas.Detach) -> None:
        """Without effect on what is not alive, as a cancel is."""
        if (id := self._ids.get(message.request_id)) is not None:
            async_engine = self._alive[id].async_engine
            self._end(id)
            async_engine.detach(id)
            self._event_queue.put([named_frame("detached", message.request_id)])

    async def _resume(self, message: schemas.Resume) -> None:
        service = await self._models.holding(message.session, self._owner)
        cursor = Cursor(message.last_seq, message.epoch)
        id = self._new_id(message.request_id)
        self._begin(id, message.request_id, service, None)
        self._catch_up_beside(
            id,
            lambda: service.sessions.resume(
                message.session, self._owner, cursor, id, self._event_queue, bool(message.take_over)
            ),
        )

    def _catch_up_beside(self, id: str, resume: Callable[[], Awaitable[Resumed]]) -> None:
        """Sends what was missed beside what else the socket does."""
        task = asyncio.create_task(self._catch_up(id, resume))
        self._resuming.add(task)
        task.add_done_callback(self._resuming.discard)

    async def _catch_up(self, id: str, resume: Callable[[], Awaitable[Resumed]]) -> None:
        if (alive := self._alive.get(id)) is None:  # detached before it began
            return
        with alive.async_engine.use():
            await self._send_missed(id, alive, resume)

    async def _send_missed(
        self, id: str, alive: Alive, resume: Callable[[], Awaitable[Resumed]]
    ) -> None:
        work, event_queue, async_engine = alive.work, self._event_queue, alive.async_engine
        try:
            resumed = await resume()
            if id not in self._alive:  # detached meanwhile, perhaps before it was attached
                async_engine.detach(id)
                return
            if alive.cancelled:
                async_engine.cancel(id)
            event_queue.put([resumed_frame(work.request_id, resumed, async_engine.epoch_name)])
            async for events in alive.service.sessions.missed(self._owner, resumed, id):
                await event_queue.emptied()
                if id not in self._alive:
                    return
                event_queue.put([frame for e in events if (frame := work.frame(e)) is not None])
            if resumed.info.busy:
                async_engine.caught_up(id)
            elif id in self._alive:
                self._end(id)
        except RequestError as error:
            async_engine.detach(id)
            if id in self._alive:
                self._end(id)
                event_queue.put([error_frame(work.request_id, error)])


def _reason(error: RequestError) -> Close:
    if isinstance(error, ReaderTooSlow):
        return Close(1008, "the client reads too slowly")
    return Close(1011, "the engine has stopped")


async def _stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
