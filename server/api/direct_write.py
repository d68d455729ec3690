"""The short way to the wire, which `server.http.http_protocol` offers next to ASGI's ``send``.

Most of a token's cost would be the layers between the engine's event and the
socket. Where the server offers it, a write goes there at once, from whatever
runs in the event loop. Any other ASGI server works without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.types import Scope

#: The name of the extension in a scope.
EXTENSION = "everstream.write"

Write = Callable[[Sequence[bytes]], bool]
"""Writes all parts at once, or nothing and returns False where that is not possible now.

Over HTTP the parts are joined to one piece of a body that has begun and has no
declared length; over a WebSocket each is a text frame. After False the caller
sends by ASGI's ``send``, which waits until the client has read.
"""


def writer_of(scope: Scope) -> Write:
    """What ``scope`` offers, or a `Write` that never can."""
    write: Write = scope.get("extensions", {}).get(EXTENSION, _never)
    return write


def _never(parts: Sequence[bytes]) -> bool:
    return False
