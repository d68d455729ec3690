"""`/v1/stream`: many generations over one socket, one reader and one sender task.

The reader always reads, so that pings, pongs and cancels get through whatever
the sender does. Everything to the client goes through one bounded outbox, in
order; when it overflows, the socket ends with 1008 and its requests with it.
While the outbox is empty and the client reads, tokens take the shortcut and wake
nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from server.api import schemas
from server.api.auth import SUBPROTOCOL
from server.api.errors import invalid
from server.api.frames import Work, created_frame, deleted_frame, error_frame
from server.api.service import Service
from server.api.shortcut import Write, writer_of
from server.api.translate import parse_message, request_id_of
from server.engine.errors import EngineError, InvalidRequest, QueueFull
from server.engine.types import Event, Finished, Request, TokenEvent
from server.outbox import Outbox, ReaderTooSlow


@dataclass(frozen=True, slots=True)
class Close:
    """Ends the socket after what was sent before it."""

    code: int
    reason: str


class StreamEndpoint:
    """The ASGI application behind the route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner: str = scope["state"]["owner"]
        offered = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
        await receive()
        await send({"type": "websocket.accept", "subprotocol": offered})
        stream = Stream(self._service, owner, receive, send, writer_of(scope))
        self._service.streams.add(stream)
        self._service.driver.metrics.websockets += 1
        try:
            if not self._service.driver.ready:
                stream.close(1012, "the server is draining")
            await stream.run()
        finally:
            self._service.driver.metrics.websockets -= 1
            self._service.streams.discard(stream)
            stream.ended.set_result(None)


class Stream:
    """One socket. ``ended`` is done when nothing more is sent on it."""

    def __init__(
        self, service: Service, owner: str, receive: Receive, send: Send, write: Write
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._service = service
        self._driver = service.driver
        self._owner = owner
        self._receive = receive
        self._send = send
        self._write = write
        self._outbox: Outbox[Event | bytes | Close] = Outbox(service.outbox_events)
        self._prefix = secrets.token_hex(8) + "-"
        self._alive: dict[str, Work] = {}

    async def run(self) -> None:
        """Serves the socket until either side closes it; then cancels what still runs."""
        reader = asyncio.create_task(self._read())
        sender = asyncio.create_task(self._send_all())
        try:
            watched: set[asyncio.Future[Any]] = {reader, sender, self._outbox.broken}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._driver.release(self._outbox)
            await _stop(reader, sender)
        if self._outbox.broken.done():
            await self._send_close(_reason(self._outbox.broken.result()))

    def close(self, code: int, reason: str) -> None:
        """Closes the socket after everything that waits in its outbox."""
        self._outbox.put([Close(code, reason)])

    # Client to server

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            if text is None:
                error = InvalidRequest("frames must be text")
                self._outbox.put([error_frame(None, error)])
            else:
                await self._handle(text)

    async def _handle(self, text: str) -> None:
        try:
            message = parse_message(text)
        except InvalidRequest as error:
            self._outbox.put([error_frame(request_id_of(text), error)])
            return
        try:
            await self._obey(message)
        except EngineError as error:
            self._outbox.put([error_frame(message.request_id, error)])

    async def _obey(self, message: schemas.Message) -> None:
        if isinstance(message, schemas.Cancel):
            # Without effect on what is not alive: its last frame was the answer.
            self._driver.cancel(self._prefix + message.request_id)
        elif isinstance(message, schemas.Create):
            info = await self._driver.create_session(self._owner)
            self._outbox.put([created_frame(message.request_id, info)])
        elif isinstance(message, schemas.Delete):
            await self._driver.delete_session(message.session, self._owner)
            self._outbox.put([deleted_frame(message.request_id, message.session)])
        else:
            await self._start(message)

    async def _start(self, message: schemas.Generate | schemas.Append) -> None:
        if self._prefix + message.request_id in self._alive:
            raise invalid("request_id", "names a live request of this socket")
        if len(self._alive) >= self._service.max_socket_requests:
            raise QueueFull("too many requests on this socket")
        request = await self._translate(message)
        self._alive[request.request_id] = Work(message.request_id, request)
        try:
            await self._driver.submit(request, self._outbox)
        except EngineError:
            del self._alive[request.request_id]
            raise

    async def _translate(self, message: schemas.Generate | schemas.Append) -> Request:
        translator = self._service.translator
        request_id = self._prefix + message.request_id
        if isinstance(message, schemas.Append):
            return await translator.append(request_id, self._owner, message.session, message)
        return await translator.generate(request_id, self._owner, message, message)

    # Server to client

    async def _send_all(self) -> None:
        with contextlib.suppress(OSError, EngineError):
            while True:
                frames: list[bytes] = []
                for item in await self._outbox.take(self._send_now):
                    if isinstance(item, Close):
                        await self._send_frames(frames)
                        await self._send_close(item)
                        return
                    if (frame := self._frame(item)) is not None:
                        frames.append(frame)
                await self._send_frames(frames)

    def _send_now(self, items: Sequence[Event | bytes | Close]) -> bool:
        """The shortcut for tokens, which are nearly all there is."""
        frames = []
        for item in items:
            if not isinstance(item, TokenEvent):
                return False
            frames.append(self._alive[item.request_id].token(item))
        return self._write(frames)

    async def _send_frames(self, frames: list[bytes]) -> None:
        if self._write(frames):
            return
        for frame in frames:
            await self._send({"type": "websocket.send", "text": frame.decode()})

    def _frame(self, item: Event | bytes) -> bytes | None:
        if isinstance(item, bytes):
            return item
        work = self._alive[item.request_id]
        if isinstance(item, Finished):
            del self._alive[item.request_id]
        return work.frame(item)

    async def _send_close(self, close: Close) -> None:
        message = {"type": "websocket.close", "code": close.code, "reason": close.reason}
        with contextlib.suppress(OSError, RuntimeError):  # the client may have closed first
            await self._send(message)


def _reason(error: EngineError) -> Close:
    if isinstance(error, ReaderTooSlow):
        return Close(1008, "the client reads too slowly")
    return Close(1011, "the engine has stopped")


async def _stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
