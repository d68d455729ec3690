"""The short way to the wire, which `server.http.http_protocol` offers next to ASGI's ``send``.

Most of a token's cost would be the layers between the engine's event and the
socket. Where the server offers it, a write goes there at once, from whatever
runs in the event loop. Any other ASGI server works without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.types import Scope

from server.engine.types import TokenEvent
from server.runtime.event_queue import EventQueue

#: The name of the extension in a scope.
EXTENSION = "everstream.write"

Write = Callable[[Sequence[bytes]], bool]
"""Writes all parts at once, or nothing and returns False where that is not possible now.

Over HTTP the parts are joined to one piece of a body that has begun and has no
declared length; over a WebSocket each is a text frame. After False the caller
sends by ASGI's ``send``, which waits until the client has read.
"""

T = TypeVar("T")


def writer_of(scope: Scope) -> Write:
    """What ``scope`` offers, or a `Write` that never can."""
    write: Write = scope.get("extensions", {}).get(EXTENSION, _never)
    return write


def _never(parts: Sequence[bytes]) -> bool:
    return False


class DirectWriter:
    """Writes tokens, which are nearly all there is, as soon as an event queue gets them.

    An encoder may count what it encodes: what could not be written is kept encoded.
    """

    def __init__(self, write: Write, encode: Callable[[Sequence[TokenEvent]], list[bytes]]) -> None:
        self._write, self._encode = write, encode
        self._refused: list[bytes] = []
        self._num_refused = 0

    async def take(self, event_queue: EventQueue[T]) -> tuple[list[bytes], list[T]]:
        """The next items that were not written: the parts that were refused, then the others."""
        items = await event_queue.take(self._offer)
        parts, rest = self._refused, items[self._num_refused :]
        self._refused, self._num_refused = [], 0
        return parts, rest

    def _offer(self, items: Sequence[object]) -> bool:
        """For `EventQueue.take`: whether all of ``items`` were tokens, and are written."""
        tokens = [item for item in items if isinstance(item, TokenEvent)]
        if len(tokens) < len(items):
            return False
        parts = self._encode(tokens)
        if self._write(parts):
            return True
        self._refused, self._num_refused = parts, len(tokens)
        return False
