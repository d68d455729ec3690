"""Answers on their way back: the request's id in every head, and errors in the one shape.

The id is also in what is logged of the request. A client may give its own, to find its request
again; what cannot be one is replaced.
"""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.api.auth.authenticator import SUBPROTOCOL
from server.api.auth.scopes import ScopeMissing
from server.api.auth.tenants import RateLimited
from server.api.errors import (
    InvalidApiKey,
    TooManyConnections,
    error_body,
    error_headers,
    outcome,
)
from server.errors import RequestError

HEADER = "x-request-id"
#: Where a scope's state has the id of its request.
STATE = "http_request_id"

_VALID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)

_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")

#: How a browser's socket is refused: a page cannot see the status of a refused handshake.
_CLOSES: dict[type[RequestError], tuple[int, str]] = {
    InvalidApiKey: (1008, "wrong key"),
    ScopeMissing: (1008, "this key may not do that"),
    RateLimited: (1013, "the limits of this key are reached"),
    TooManyConnections: (1013, "too many connections"),
}


def new_request_id() -> str:
    """Unguessable, and not the same twice."""
    return f"req_{secrets.token_hex(16)}"


class Reply:
    """``send`` for one request: the head of its answer gets ``headers``, the request's id first.

    The answer to HEAD has no body: a stream ends with its head, and the app sees the client leave.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        state = scope.setdefault("state", {})
        if STATE not in state:
            given = Headers(scope=scope).get(HEADER, "")
            state[STATE] = given if _VALID.fullmatch(given) else new_request_id()
        self.headers = [(HEADER.encode(), state[STATE].encode())]
        self.has_begun = False
        self._send = send
        self._is_head = scope.get("method") == "HEAD"
        self._is_over = False

    async def __call__(self, message: Message) -> None:
        if message["type"] in _STARTS:
            self.has_begun = True
            message = {**message, "headers": [*message.get("headers", ()), *self.headers]}
        elif self._is_head:
            if self._is_over:
                return
            self._is_over = True
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)


def error_response(error: RequestError) -> Response:
    """The HTTP answer for ``error``."""
    return Response(error_body(error), outcome(error).status, error_headers(error))


async def refuse(scope: Scope, receive: Receive, send: Send, error: RequestError) -> None:
    """Answers with ``error``; a WebSocket's handshake is refused by the same HTTP answer.

    A socket that offers our subprotocol, or is one too many, is accepted and closed at once where
    the error has a code for that.
    """
    if scope["type"] == "websocket":
        await receive()
        offered = SUBPROTOCOL if SUBPROTOCOL in scope["subprotocols"] else None
        close = _CLOSES.get(type(error))
        if close is not None and (offered or isinstance(error, TooManyConnections)):
            code, reason = close
            await send({"type": "websocket.accept", "subprotocol": offered})
            await send({"type": "websocket.close", "code": code, "reason": reason})
            return
    await answer_with_error(scope, send, error)


async def answer_with_error(scope: Scope, send: Send, error: RequestError) -> None:
    """Answers with ``error`` where nothing more is read."""
    if scope["type"] == "http":
        await error_response(error)(scope, _nothing, send)
        return
    headers = [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    start = {"type": "websocket.http.response.start", "status": outcome(error).status}
    await send({**start, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": error_body(error)})


async def _nothing() -> Message:
    raise AssertionError("an error's answer reads nothing")
