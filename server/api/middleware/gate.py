"""What each request passes on its way to the routes, and its answer on the way back.

Pure ASGI, for HTTP and WebSockets alike. Each check has its own file; the order is here.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.auth.authenticator import OPEN_PATHS, Authenticator
from server.api.errors import FAILED, TooManyConnections
from server.api.middleware.connections import EXTENSION as CONNECTION
from server.api.middleware.connections import ConnectionTable, address_of
from server.api.middleware.cors import Cors
from server.api.middleware.hosts import HostCheck
from server.api.middleware.limits import BodyLimit
from server.api.middleware.refuse import answer_with_error, refuse
from server.api.middleware.request_ids import HEADER, request_id_of
from server.api.middleware.wellformed import check_head
from server.api.streaming import EXTENSION as DIRECT_WRITE
from server.errors import InternalFailure, RequestError

_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")


class Gate:
    """Checks and admits each request to ``app``, which answers it, or answers it instead.

    ``hosts`` and ``cors`` are None where every name and no other origin is allowed. What a
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
    ) -> None:
        self._app = app
        self._hosts, self._cors, self._connections = hosts, cors, connections
        self._authenticator, self._bodies = authenticator, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        reply = Reply(scope, send)
        with ExitStack() as held:
            scope["state"]["held"] = held
            try:
                answer = self._answer_for(scope, reply, held)
                if scope["type"] == "http":
                    receive = self._bodies.bounded(scope, receive)
                    scope = _as_get(scope)
                await answer(scope, receive, reply)
            except Exception:
                # The framework's answer would have no request id, and other origins no right to it.
                if scope["type"] == "http" and not reply.has_begun:
                    await answer_with_error(scope, reply, InternalFailure(FAILED))
                raise

    def _answer_for(self, scope: Scope, reply: Reply, held: ExitStack) -> ASGIApp:
        """The app for a request that passes the checks, else what answers in its place."""
        headers = Headers(scope=scope)
        try:
            check_head(scope, headers)
        except RequestError as error:  # what follows on the connection cannot be trusted
            if scope["type"] == "http":
                reply.headers.append((b"connection", b"close"))
            return partial(refuse, error=error)
        try:
            if self._hosts is not None:
                self._hosts.check(scope, headers)
            if self._cors is not None and scope["type"] == "http" and "origin" in headers:
                reply.headers += self._cors.marks(headers)
                if self._cors.is_preflight(scope, headers):
                    return self._cors.preflight(headers)
            self._hold_connection(scope, held)
            self._authenticator.admit(scope, headers, held)
            if scope["type"] == "http":
                self._bodies.check(scope, headers)
        except RequestError as error:
            return partial(refuse, error=error)
        return self._app

    def _hold_connection(self, scope: Scope, held: ExitStack) -> None:
        """`/health` and `/ready` always answer: an overload must not look like a death."""
        if scope["path"] in OPEN_PATHS:
            return
        client = scope.get("client")
        address = address_of(client[0] if client else "")
        connection = scope.get("extensions", {}).get(CONNECTION)
        if not self._connections.admit(address, connection):
            raise TooManyConnections
        held.callback(self._connections.release, address, connection)


class Reply:
    """``send`` for one request: the head of its answer gets ``headers``, the request's id first.

    The answer to HEAD has no body: a stream ends with its head, and the app sees the client leave.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.headers = [(HEADER.encode(), request_id_of(scope).encode())]
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


def _as_get(scope: Scope) -> Scope:
    """HEAD wherever GET is: the routes answer a GET, and write no body directly.

    For one to which it makes a difference, ``is_head`` is in the state.
    """
    scope["state"]["is_head"] = scope["method"] == "HEAD"
    if not scope["state"]["is_head"]:
        return scope
    extensions = {n: v for n, v in scope.get("extensions", {}).items() if n != DIRECT_WRITE}
    return {**scope, "method": "GET", "extensions": extensions}
