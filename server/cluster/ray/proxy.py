"""What our requests need of Ray's proxy, in the proxy's own process.

Ray's proxy imports `middlewares` where the environment that Ray was started in says
``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=server.cluster.ray.proxy:middlewares``.
Without it all works, but sessions are found only by the header, and a client that
never reads is held for as long as it likes.
"""

from __future__ import annotations

import asyncio
import re
from urllib.parse import parse_qs

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Serve's name for it; see ``RAY_SERVE_SESSION_ID_HEADER_KEY``.
SESSION_HEADER = b"x-session-id"
#: By these a client would tell Ray's proxy when to give up, which is ours to say.
REFUSED_HEADERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
#: How long a client may take what waits for it, before it counts as gone.
SEND_TIMEOUT_S = 20.0

_SESSION = re.compile(r"sess_[0-9a-z]{1,59}", re.ASCII)
_PATH = re.compile(r"/v1/sessions/([^/]+)(?:/|$)")


def middlewares() -> list[Middleware]:
    """For Serve, the innermost first."""
    return [Middleware(SessionHint), Middleware(Patience)]


class SessionHint:
    """Puts the session that path, query or header name into the header that the router sees.

    The path is the truth. ``?session=`` is for what names its session only in a body
    or in a frame: `/v1/stream` and `/v1/completions`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope = {**scope, "headers": list(_hinted(scope))}
        await self._app(scope, receive, send)


def _hinted(scope: Scope) -> list[tuple[bytes, bytes]]:
    headers = [(name.lower(), value) for name, value in scope["headers"]]
    kept = [
        (name, value)
        for name, value in headers
        if name.replace(b"_", b"-") != SESSION_HEADER and name not in REFUSED_HEADERS
    ]
    session = _session_of(scope, dict(headers).get(SESSION_HEADER, b""))
    return kept if session is None else [*kept, (SESSION_HEADER, session.encode())]


def _session_of(scope: Scope, header: bytes) -> str | None:
    in_path = _PATH.match(scope["path"])
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"), max_num_fields=16)
    places = [in_path[1] if in_path else "", *query.get("session", ()), header.decode("latin-1")]
    return next((place for place in places if _SESSION.fullmatch(place)), None)


class Patience:
    """Takes a client for gone that has not read for ``timeout_s``.

    Between Ray's proxy and a replica nothing holds back a stream without a reader,
    so it would grow in the proxy's memory for as long as it runs.
    """

    def __init__(self, app: ASGIApp, timeout_s: float = SEND_TIMEOUT_S) -> None:
        self._app, self._timeout_s = app, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        gone = asyncio.Event()

        async def bounded_send(message: Message) -> None:
            if gone.is_set():
                return
            try:
                async with asyncio.timeout(self._timeout_s):
                    await send(message)
            except TimeoutError:
                gone.set()

        async def bounded_receive() -> Message:
            reading = asyncio.ensure_future(receive())
            leaving = asyncio.ensure_future(gone.wait())
            try:
                await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
                return reading.result() if reading.done() else _left(scope)
            finally:
                reading.cancel()
                leaving.cancel()

        await self._app(scope, bounded_receive, bounded_send)


def _left(scope: Scope) -> Message:
    if scope["type"] == "http":
        return {"type": "http.disconnect"}
    return {"type": "websocket.disconnect", "code": 1008, "reason": "the client reads too slowly"}
