"""What HTTP leaves open and no peer may use: endless heads, two framings, a bad Host or path."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import HeadTooLarge
from server.api.middleware.refuse import refuse
from server.api.schemas.names import REFUSAL, has_control
from server.errors import RequestError, invalid

# h11 bounds only a head that comes in pieces.
MAX_HEAD_BYTES = 32 * 1024

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", re.ASCII)


class WellFormed:
    """Refuses with 400 or 431 and closes the connection: what follows on it cannot be trusted."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = _problem(scope) if scope["type"] != "lifespan" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await refuse(scope, receive, _closing(send), problem)


def _problem(scope: Scope) -> RequestError | None:
    headers = Headers(scope=scope)
    if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEAD_BYTES:
        return HeadTooLarge(MAX_HEAD_BYTES)
    if not _HOST.fullmatch(headers.get("host", "")):
        return invalid("Host", "must be a host name with an optional port")
    if has_control(scope["path"]):
        return invalid("path", REFUSAL)
    if "content-length" in headers and "transfer-encoding" in headers:
        return invalid("Content-Length", "must not come with Transfer-Encoding")
    return None


def _closing(send: Send) -> Send:
    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return closing
