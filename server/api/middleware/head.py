"""HEAD wherever GET is: the same head, and no body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.direct_write import EXTENSION


class HeadAsGet:
    """Lets the app answer a GET. A stream ends with its head: the app sees the client leave."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        extensions = {n: v for n, v in scope.get("extensions", {}).items() if n != EXTENSION}
        is_over = False

        async def bare(message: Message) -> None:
            nonlocal is_over
            if message["type"] == "http.response.start":
                await send(message)
            elif not is_over:
                is_over = True
                await send({"type": "http.response.body", "body": b""})

        await self._app({**scope, "method": "GET", "extensions": extensions}, receive, bare)
