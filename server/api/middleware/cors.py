"""Pages of other origins that the operator allows: what a browser asks before, and lets them read.

No cookies are involved, so that an allowed origin may send any header: it needs a key all the
same. Errors are JSON here as everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import ForeignOrigin, MethodNotAllowed
from server.api.middleware.refuse import error_response
from server.errors import RequestError

METHODS = ("GET", "HEAD", "POST", "DELETE")
#: Ours that a page may read, beside those that every page may.
EXPOSED = ("Allow", "Retry-After", "WWW-Authenticate", "X-Request-Id")
MAX_AGE_S = 600
MAX_HEADERS_CHARS = 4096

_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")


class Cors:
    """Answers preflights, and marks the answers to ``allowed`` origins; ``*`` is every origin."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if (origin := headers.get("origin")) is None:
            await self._app(scope, receive, send)
            return
        marked = self._marked(origin, send)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(origin, headers)(scope, receive, marked)
        else:
            await self._app(scope, receive, marked)

    def _preflight(self, origin: str, headers: Headers) -> Response:
        problem: RequestError | None = None
        if not self._allows(origin):
            problem = ForeignOrigin()
        elif headers["access-control-request-method"] not in METHODS:
            problem = MethodNotAllowed()
        if problem is not None:
            return error_response(problem)
        allowed = {
            "access-control-allow-methods": ", ".join(METHODS),
            "access-control-max-age": str(MAX_AGE_S),
        }
        wanted = headers.get("access-control-request-headers", "")
        if len(wanted) <= MAX_HEADERS_CHARS and _NAMES.fullmatch(wanted):
            allowed["access-control-allow-headers"] = wanted
        return Response(status_code=200, headers=allowed)

    def _marked(self, origin: str, send: Send) -> Send:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(raw=list(message["headers"]))
                answer.add_vary_header("Origin")
                if self._allows(origin):
                    answer["access-control-allow-origin"] = origin
                    answer["access-control-expose-headers"] = ", ".join(EXPOSED)
                message = {**message, "headers": answer.raw}
            await send(message)

        return marked

    def _allows(self, origin: str) -> bool:
        return "*" in self._allowed or origin in self._allowed
