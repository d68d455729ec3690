"""What each request passes on its way to the routes, and its answer on the way back.

Pure ASGI, for HTTP and WebSockets alike. Most checks have their own file; the order is here.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.auth.authenticator import OPEN_PATHS, Authenticator
from server.api.errors import FAILED, HeadTooLarge, TooManyConnections
from server.api.middleware.connections import CONNECTION_EXTENSION, ConnectionTable, address_of
from server.api.middleware.cors import Cors
from server.api.middleware.hosts import HostCheck
from server.api.middleware.limits import BodyLimit
from server.api.middleware.replies import Reply, answer_with_error, refuse
from server.api.schemas.names import REFUSAL, has_control
from server.api.streaming import WRITE_EXTENSION
from server.errors import InternalFailure, RequestError, invalid

# h11 bounds only a head that comes in pieces.
MAX_HEAD_BYTES = 32 * 1024

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", re.ASCII)


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
