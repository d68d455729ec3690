"""What each request passes on its way to the routes, and its answer on the way back."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.answers import WRITE_EXTENSION
from server.api.auth import OPEN_PATHS, SUBPROTOCOL, Authenticator, RateLimited, ScopeMissing
from server.api.connections import CONNECTION_EXTENSION, ConnectionTable, address_of
from server.api.errors import (
    FAILED,
    USUAL_ERRORS,
    HeadTooLarge,
    InvalidApiKey,
    TooManyConnections,
    error_body,
    error_headers,
    outcome,
)
from server.api.middleware import BodyLimit, Cors, HostCheck
from server.api.routing import DIALECT, Dialect
from server.api.schemas.parse import IGNORED
from server.api.schemas.wire import REFUSAL, has_control
from server.errors import InternalFailure, RequestError, invalid

# -------------------------------------------------------------------------------------------------
# Answers on their way back: the request's id in every head, and errors in the one shape.
#
# The id is also in what is logged of the request. A client may give its own, to find its request
# again; what cannot be one is replaced.


HEADER = "x-request-id"
#: Names the fields of a body that are known and have no effect here.
IGNORED_HEADER = b"x-everstream-ignored"
#: Names in it: a client may send many tools of types that are left out.
MAX_IGNORED = 64
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

    And the names of fields that had no effect, where the route has noted any.

    The answer to HEAD has no body: a stream ends with its head, and the app sees the client leave.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        state = scope.setdefault("state", {})
        if STATE not in state:
            given = Headers(scope=scope).get(HEADER, "")
            state[STATE] = given if _VALID.fullmatch(given) else new_request_id()
        self.headers = [(HEADER.encode(), state[STATE].encode())]
        self.has_begun = False
        self._send, self._state = send, state
        self._is_head = scope.get("method") == "HEAD"
        self._is_over = False

    async def __call__(self, message: Message) -> None:
        if message["type"] in _STARTS:
            self.has_begun = True
            headers = [*message.get("headers", ()), *self.headers]
            if ignored := self._state.get(IGNORED):
                headers.append((IGNORED_HEADER, ", ".join(sorted(ignored)[:MAX_IGNORED]).encode()))
            message = {**message, "headers": headers}
        elif self._is_head:
            if self._is_over:
                return
            self._is_over = True
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)


def error_response(error: RequestError, scope: Scope) -> Response:
    """The HTTP answer for ``error``, as the API has it that the request of ``scope`` is for."""
    dialect: Dialect | None = scope.get("state", {}).get(DIALECT)
    shape = USUAL_ERRORS if dialect is None else dialect.errors
    return Response(shape.body(error), shape.status(error), error_headers(error))


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
        await error_response(error, scope)(scope, _nothing, send)
        return
    headers = [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    start = {"type": "websocket.http.response.start", "status": outcome(error).status}
    await send({**start, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": error_body(error)})


async def _nothing() -> Message:
    raise AssertionError("an error's answer reads nothing")


# -------------------------------------------------------------------------------------------------
# Pure ASGI, for HTTP and WebSockets alike. Most checks are in `middleware.py`; the order is here.


# h11 bounds only a head that comes in pieces.
MAX_HEAD_BYTES = 32 * 1024

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", re.ASCII)


class Gate:
    """Checks and admits each request to ``app``, which answers it, or answers it instead.

    ``hosts`` and ``cors`` are None where every name and no other origin is allowed. The first of
    ``dialects`` that owns a request says how errors look. What a
    request holds is released after its answer; routes add to it: ``held`` in the scope's state.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: HostCheck | None,
        cors: Cors | None,
        connections: ConnectionTable,
        authenticator: Authenticator,
        bodies: BodyLimit,
        dialects: Sequence[Dialect] = (),
    ) -> None:
        self._app = app
        self._hosts, self._cors, self._connections = hosts, cors, connections
        self._authenticator, self._bodies = authenticator, bodies
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        reply = Reply(scope, send)
        with ExitStack() as held:
            scope["state"]["held"] = held
            try:
                answer, receive = self._answer_for(scope, receive, reply, held)
                if scope["type"] == "http":
                    scope["state"]["is_head"] = scope["method"] == "HEAD"
                    if scope["state"]["is_head"]:
                        scope = _as_get(scope)
                await answer(scope, receive, reply)
            except Exception:
                # The framework's answer would have no request id, and other origins no right to it.
                if scope["type"] == "http" and not reply.has_begun:
                    await answer_with_error(scope, reply, InternalFailure(FAILED))
                raise

    def _answer_for(
        self, scope: Scope, receive: Receive, reply: Reply, held: ExitStack
    ) -> tuple[ASGIApp, Receive]:
        """The app for a request that passes the checks, else what answers in its place.

        With what it receives: the app gets a body within the bounds.
        """
        headers = Headers(scope=scope)
        owners = (each for each in self._dialects if each.owns(scope["path"], headers))
        scope["state"][DIALECT] = dialect = next(owners, None)
        if dialect is not None and dialect.request_id_header is not None:
            reply.headers.append((dialect.request_id_header.encode(), reply.headers[0][1]))
        try:
            check_head(scope, headers)
        except RequestError as error:  # what follows on the connection cannot be trusted
            if scope["type"] == "http":
                reply.headers.append((b"connection", b"close"))
            return partial(refuse, error=error), receive
        try:
            if self._hosts is not None:
                self._hosts.check(scope, headers)
            if self._cors is not None and scope["type"] == "http" and "origin" in headers:
                reply.headers += self._cors.marks(headers)
                if self._cors.is_preflight(scope, headers):
                    return self._cors.preflight(headers), receive
            if scope["path"] not in OPEN_PATHS:  # an overload must not look like a dead server
                client = scope.get("client")
                address = address_of(client[0] if client else "")
                connection = scope.get("extensions", {}).get(CONNECTION_EXTENSION)
                if not self._connections.admit(address, connection):
                    raise TooManyConnections
                held.callback(self._connections.release, address, connection)
            self._authenticator.admit(scope, headers, held)
            if scope["type"] == "http":
                receive = self._bodies.bounded(scope, headers, receive)
        except RequestError as error:
            return partial(refuse, error=error), receive
        return self._app, receive


def check_head(scope: Scope, headers: Headers) -> None:
    """Refuses endless heads, two framings, and a bad Host or path, which HTTP leaves open.

    Raises `HeadTooLarge`, or `InvalidRequest` for a head that may be read in two ways.
    """
    if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEAD_BYTES:
        raise HeadTooLarge(MAX_HEAD_BYTES)
    if not _HOST.fullmatch(headers.get("host", "")):
        raise invalid("Host", "must be a host name with an optional port")
    if has_control(scope["path"]):
        raise invalid("path", REFUSAL)
    if "content-length" in headers and "transfer-encoding" in headers:
        raise invalid("Content-Length", "must not come with Transfer-Encoding")


def _as_get(scope: Scope) -> Scope:
    """HEAD wherever GET is: the routes answer a GET, and write no body directly.

    For one to which it makes a difference, ``is_head`` is in the state.
    """
    extensions = {n: v for n, v in scope.get("extensions", {}).items() if n != WRITE_EXTENSION}
    return {**scope, "method": "GET", "extensions": extensions}
