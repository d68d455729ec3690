"""What leaves on a socket of `/v1/stream`: frames, in the order in which they were put.

While the event queue is empty and the client reads, tokens take the direct write and wake nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.types import Send

from server.api.direct_write import Write
from server.api.schemas.frames import Work
from server.engine.types import Event, Failed, Finished, Migrated, TokenEvent
from server.errors import RequestError
from server.models.service import Service
from server.runtime.async_engine import AsyncEngine
from server.runtime.event_queue import EventQueue


@dataclass(frozen=True, slots=True)
class Close:
    """Ends the socket after what was sent before it."""

    code: int
    reason: str


@dataclass(slots=True)
class Alive:
    """A live request, and the model that it runs on.

    ``cancelled``: its client wants its end, which what is being resumed gets once
    it has been found.
    """

    work: Work
    service: Service
    cancelled: bool = False

    @property
    def async_engine(self) -> AsyncEngine:
        return self.service.async_engine


class Sender:
    """Writes what is in ``event_queue``; ``alive`` are the requests, by the engine's id.

    ``end`` is called with the name of one that has had its last event.
    """

    def __init__(
        self,
        event_queue: EventQueue[Event | bytes | Close],
        alive: Mapping[str, Alive],
        end: Callable[[str], object],
        send: Send,
        write: Write,
    ) -> None:
        self._event_queue, self._alive, self._end = event_queue, alive, end
        self._send, self._write = send, write

    async def run(self) -> None:
        """Until the socket is closed, or cannot be written."""
        with contextlib.suppress(OSError, RequestError):
            while True:
                frames: list[bytes] = []
                moved = False
                for item in await self._event_queue.take(self._send_now):
                    moved |= isinstance(item, Migrated)
                    if isinstance(item, Close):
                        await self._send_frames(frames)
                        await self.close(item)
                        return
                    if (frame := self._frame(item)) is not None:
                        frames.append(frame)
                await self._send_frames(frames)
                if moved and not self._alive:  # so that the next one may lead elsewhere
                    await self.close(Close(1012, "what was read here goes on elsewhere"))
                    return

    async def close(self, close: Close) -> None:
        message = {"type": "websocket.close", "code": close.code, "reason": close.reason}
        with contextlib.suppress(OSError, RuntimeError):  # the client may have closed first
            await self._send(message)

    def _send_now(self, items: Sequence[Event | bytes | Close]) -> bool:
        """The direct write for tokens, which are nearly all there is."""
        frames = []
        for item in items:
            if not isinstance(item, TokenEvent):
                return False
            if (alive := self._alive.get(item.request_id)) is not None:
                frames.append(alive.work.token(item))
        return self._write(frames)

    async def _send_frames(self, frames: list[bytes]) -> None:
        if self._write(frames):
            return
        for frame in frames:
            await self._send({"type": "websocket.send", "text": frame.decode()})

    def _frame(self, item: Event | bytes) -> bytes | None:
        if isinstance(item, bytes):
            return item
        alive = self._alive.get(item.request_id)
        if alive is None:  # detached meanwhile
            return None
        if isinstance(item, Finished | Failed | Migrated):
            self._end(item.request_id)
        return alive.work.frame(item)
