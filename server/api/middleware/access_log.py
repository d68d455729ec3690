"""A line of the log for each request, where it is asked for: who, what, how it ended, how long.

Never a query, a header or a body: these have keys and prompts.
"""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("everstream.access")

MAX_PATH_CHARS = 200


class AccessLog:
    """Pure ASGI. A WebSocket's line comes when it has ended, with 101 or what refused it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        begun_s = time.monotonic()
        status: int | None = None

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "websocket.accept":
                status = 101
            elif message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            fields = _request(scope) | {"status": status}
            took_s = round(time.monotonic() - begun_s, 3)
            logger.info("request", extra=fields | {"duration_s": took_s})


def _request(scope: Scope) -> dict[str, str]:
    client = scope.get("client")
    return {
        "client": client[0] if client else "",
        "method": scope.get("method", "WEBSOCKET"),
        "path": scope["path"][:MAX_PATH_CHARS],
    }
