"""Saying no below the routes: an error in the one shape to HTTP and to WebSocket handshakes."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.api.errors import error_body, error_headers, outcome
from server.errors import RequestError


def error_response(error: RequestError) -> Response:
    """The HTTP answer for ``error``."""
    return Response(error_body(error), outcome(error).status, error_headers(error))


async def refuse(scope: Scope, receive: Receive, send: Send, error: RequestError) -> None:
    """Answers with ``error``; a WebSocket's handshake is refused by the same HTTP answer."""
    if scope["type"] == "websocket":
        await receive()
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


async def close_websocket(
    receive: Receive, send: Send, code: int, reason: str, subprotocol: str | None = None
) -> None:
    """Accepts and closes at once, so that a page sees the code."""
    await receive()
    await send({"type": "websocket.accept", "subprotocol": subprotocol})
    await send({"type": "websocket.close", "code": code, "reason": reason})
