"""Saying no below the routes: an error in the one shape to HTTP and to WebSocket handshakes."""

from __future__ import annotations

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

#: How a browser's socket is refused: a page cannot see the status of a refused handshake.
_CLOSES: dict[type[RequestError], tuple[int, str]] = {
    InvalidApiKey: (1008, "wrong key"),
    ScopeMissing: (1008, "this key may not do that"),
    RateLimited: (1013, "the limits of this key are reached"),
    TooManyConnections: (1013, "too many connections"),
}


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
