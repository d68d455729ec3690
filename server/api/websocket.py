"""`/v1/stream`: many generations over one socket, one reader and one sender task.

The reader always reads, so that pings, pongs and cancels get through whatever
the sender does. Everything to the client goes through one bounded outbox, in
order; when it fills, the socket's requests park until the client has read. While
the outbox is empty and the client reads, tokens take the shortcut and wake nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from server.api import schemas
from server.api.auth import SUBPROTOCOL
from server.api.errors import invalid
from server.api.frames import Work, created_frame, error_frame, named_frame, resumed_frame
from server.api.keyring import Caller
from server.api.scopes import MESSAGES
from server.api.service import Service
from server.api.shortcut import Write, writer_of
from server.api.translate import parse_message, request_id_of
from server.engine.errors import EngineError, InvalidRequest, QueueFull
from server.engine.types import Event, Request, Started, TokenEvent
from server.outbox import ON_THEIR_WAY, Outbox, ReaderTooSlow
from server.sessions import Cursor, KeyInUse, Resumed
from server.store.base import Keyed


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
        caller: Caller = scope["state"]["caller"]
        offered = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
        await receive()
        await send({"type": "websocket.accept", "subprotocol": offered})
        stream = Stream(self._service, caller, receive, send, writer_of(scope))
        self._service.streams.add(stream)
        self._service.driver.metrics.websockets += 1
        try:
            if not self._service.driver.takes_sockets:
                stream.close(1012, "the server is draining")
            await stream.run()
        finally:
            self._service.driver.metrics.websockets -= 1
            self._service.streams.discard(stream)
            stream.ended.set_result(None)


class Stream:
    """One socket. ``ended`` is done when nothing more is sent on it."""

    def __init__(
        self, service: Service, caller: Caller, receive: Receive, send: Send, write: Write
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._service = service
        self._driver, self._sessions = service.driver, service.sessions
        self._caller = caller
        self._owner = caller.tenant.name
        self._receive = receive
        self._send = send
        self._write = write
        self._outbox: Outbox[Event | bytes | Close] = Outbox(
            service.outbox_events, self._press, ON_THEIR_WAY
        )
        self._resuming: set[asyncio.Task[None]] = set()
        self._prefix = secrets.token_hex(8)
        self._num_begun = 0
        self._alive: dict[str, Work] = {}  # by the engine's names
        self._ids: dict[str, str] = {}  # the engine's names by the client's

    async def run(self) -> None:
        """Serves the socket until either side closes it; then cancels what still runs."""
        reader = asyncio.create_task(self._read())
        sender = asyncio.create_task(self._send_all())
        try:
            watched: set[asyncio.Future[Any]] = {reader, sender, self._outbox.broken}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._driver.release(self._outbox)
            await _stop(reader, sender, *self._resuming)
        if self._outbox.broken.done():
            await self._send_close(_reason(self._outbox.broken.result()))

    def close(self, code: int, reason: str) -> None:
        """Closes the socket after everything that waits in its outbox."""
        self._outbox.put([Close(code, reason)])

    def _press(self, full: bool) -> None:
        """A client that does not keep up costs nothing: what it asked for parks."""
        (self._driver.hold if full else self._driver.go_on)(self._outbox)

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
            message = parse_message(text, self._service.translator.max_ids)
        except InvalidRequest as error:
            self._outbox.put([error_frame(request_id_of(text), error)])
            return
        try:
            await self._obey(message)
        except EngineError as error:
            self._outbox.put([error_frame(message.request_id, error)])

    async def _obey(self, message: schemas.Message) -> None:
        if (wanted := MESSAGES[message.type]) is not None:
            self._caller.request(wanted)
        if isinstance(message, schemas.Cancel):
            # Without effect on what is not alive: its last frame was the answer.
            if (id := self._ids.get(message.request_id)) is not None:
                self._driver.cancel(id)
        elif isinstance(message, schemas.Detach):
            self._detach(message)
        elif isinstance(message, schemas.Resume):
            self._check_free(message.request_id)
            cursor = Cursor(message.last_seq, message.epoch)
            self._resume(message.request_id, message.session, cursor, bool(message.take_over))
        elif isinstance(message, schemas.Generate | schemas.Append):
            await self._start(message)
        else:
            self._outbox.put([await self._do(message)])

    async def _do(
        self, message: schemas.Create | schemas.Delete | schemas.Fork | schemas.Rewind
    ) -> bytes:
        """The answer to a message that is about a session and runs nothing."""
        sessions, owner, epoch_name = self._sessions, self._owner, self._driver.epoch_name
        if isinstance(message, schemas.Create):
            info = await sessions.create(owner)
            return created_frame(message.request_id, info, epoch_name)
        if isinstance(message, schemas.Delete):
            await sessions.delete(message.session, owner)
            return named_frame("deleted", message.request_id, session=message.session)
        if isinstance(message, schemas.Fork):
            forks = await sessions.fork(message.session, owner, message.n or 1, message.at)
            return named_frame(
                "forked",
                message.request_id,
                session=message.session,
                sessions=[fork.session for fork in forks],
                epoch=epoch_name(forks[0].epoch),
                position=forks[0].position,
            )
        info = await sessions.rewind(message.session, owner, message.at)
        return named_frame(
            "rewound",
            message.request_id,
            session=message.session,
            epoch=epoch_name(info.epoch),
            seq=info.seq,
            position=info.position,
        )

    def _check_free(self, request_id: str) -> None:
        if request_id in self._ids:
            raise invalid("request_id", "names a live request of this socket")
        if len(self._alive) >= self._service.max_socket_requests:
            raise QueueFull("too many requests on this socket")

    async def _start(self, message: schemas.Generate | schemas.Append) -> None:
        self._check_free(message.request_id)
        request = await self._translate(message)
        self._begin(request.request_id, message.request_id, request)
        found: Keyed | None = None
        try:
            if request.key is None:
                await self._sessions.submit(request, self._outbox)
            else:
                found = await self._sessions.submit_once(request, self._outbox)
        except EngineError:
            self._end(request.request_id)
            raise
        if found is not None:
            self._repeat(request.request_id, found)

    def _repeat(self, id: str, found: Keyed) -> None:
        """Answers again what has been done under the same key."""
        if not found.is_append:
            self._catch_up_beside(
                id, lambda: self._sessions.again(self._owner, found, id, self._outbox)
            )
            return
        work = self._end(id)
        if found.finished is None:
            raise KeyInUse
        self._outbox.put([work.finished(found.finished)])

    def _new_id(self, request_id: str) -> str:
        """The engine's name: a request that was left may still be there under the client's."""
        self._num_begun += 1
        return f"{self._prefix}-{self._num_begun}-{request_id}"

    def _begin(self, id: str, request_id: str, request: Request | None) -> None:
        self._ids[request_id] = id
        self._alive[id] = Work(request_id, request, self._driver.epoch_name)

    def _end(self, id: str) -> Work:
        work = self._alive.pop(id)
        del self._ids[work.request_id]
        return work

    async def _translate(self, message: schemas.Generate | schemas.Append) -> Request:
        translator = self._service.translator
        id = self._new_id(message.request_id)
        if isinstance(message, schemas.Append):
            return await translator.append(id, self._owner, message.session, message)
        if message.session is not None or message.keep:
            self._caller.require("sessions")
        return await translator.generate(id, self._owner, message, message)

    def _detach(self, message: schemas.Detach) -> None:
        """Without effect on what is not alive, as a cancel is."""
        if (id := self._ids.get(message.request_id)) is not None:
            self._end(id)
            self._driver.detach(id)
            self._outbox.put([named_frame("detached", message.request_id)])

    def _resume(self, request_id: str, session: str, cursor: Cursor, take_over: bool) -> None:
        id = self._new_id(request_id)
        self._begin(id, request_id, None)
        self._catch_up_beside(
            id,
            lambda: self._sessions.resume(
                session, self._owner, cursor, id, self._outbox, take_over
            ),
        )

    def _catch_up_beside(self, id: str, resume: Callable[[], Awaitable[Resumed]]) -> None:
        """Sends what was missed beside what else the socket does."""
        task = asyncio.create_task(self._catch_up(id, resume))
        self._resuming.add(task)
        task.add_done_callback(self._resuming.discard)

    async def _catch_up(self, id: str, resume: Callable[[], Awaitable[Resumed]]) -> None:
        if (work := self._alive.get(id)) is None:  # detached before it began
            return
        outbox = self._outbox
        try:
            resumed = await resume()
            if id not in self._alive:  # detached meanwhile, perhaps before it was attached
                self._driver.detach(id)
                return
            outbox.put([resumed_frame(work.request_id, resumed, self._driver.epoch_name)])
            async for events in self._sessions.missed(self._owner, resumed, id):
                await outbox.emptied()
                if id not in self._alive:
                    return
                outbox.put([frame for e in events if (frame := work.frame(e)) is not None])
            if resumed.info.busy:
                self._driver.caught_up(id)
            elif id in self._alive:
                self._end(id)
        except EngineError as error:
            self._driver.detach(id)
            if id in self._alive:
                self._end(id)
                outbox.put([error_frame(work.request_id, error)])

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
            if (work := self._alive.get(item.request_id)) is not None:
                frames.append(work.token(item))
        return self._write(frames)

    async def _send_frames(self, frames: list[bytes]) -> None:
        if self._write(frames):
            return
        for frame in frames:
            await self._send({"type": "websocket.send", "text": frame.decode()})

    def _frame(self, item: Event | bytes) -> bytes | None:
        if isinstance(item, bytes):
            return item
        work = self._alive.get(item.request_id)
        if work is None:  # detached meanwhile
            return None
        if not isinstance(item, Started | TokenEvent):
            self._end(item.request_id)
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
