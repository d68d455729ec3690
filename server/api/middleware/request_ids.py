"""A name for every request, in ``x-request-id`` of its answer and in what is logged of it.

A client may give its own, to find its request again; what cannot be one is replaced.
"""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
#: Where a scope's state has it.
STATE = "http_request_id"

_VALID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)
_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")


def new_request_id() -> str:
    """Unguessable, and not the same twice."""
    return f"req_{secrets.token_hex(16)}"


class RequestIds:
    """Outside of everything that answers. Puts `STATE` into the scope's state."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, with_id(scope, send))


def with_id(scope: Scope, send: Send) -> Send:
    """``send`` that adds the request's id; the same one each time for a request."""
    state = scope.setdefault("state", {})
    if STATE not in state:
        given = Headers(scope=scope).get(HEADER, "")
        state[STATE] = given if _VALID.fullmatch(given) else new_request_id()
    header = (HEADER.encode(), state[STATE].encode())

    async def named(message: Message) -> None:
        if message["type"] in _STARTS:
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return named
