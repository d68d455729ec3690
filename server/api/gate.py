"""What each request passes on its way to the routes, and its answer on the way back.

The gate is the first to see a request's head; the ASGI middleware stands around it and within it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    BodyTooLarge,
    ForeignHost,
    ForeignOrigin,
    HeadTooLarge,
    InvalidApiKey,
    MethodNotAllowed,
    RequestTimeout,
    TooManyConnections,
    UnsupportedEncoding,
    error_body,
    error_headers,
    outcome,
)
from server.api.routing import DIALECT, Dialect
from server.api.schemas.wire import IGNORED, REFUSAL, has_control
from server.errors import InternalFailure, RequestError, invalid
from server.observability.tracing import OFF, Tracer

# -------------------------------------------------------------------------------------------------
# Pages of other origins that the operator allows: what a browser asks before, and lets them read.
#
# No cookies are involved, so that an allowed origin may send any header: it needs a key all the
# same. Errors are JSON here as everywhere.


METHODS = ("GET", "HEAD", "POST", "DELETE")
#: Ours that a page may read, apart from those that every page may.
EXPOSED = (
    *("Allow", "Retry-After", "WWW-Authenticate", "X-Request-Id"),
    "X-Everstream-Ignored",
    *("ETag", "Stream-Next-Offset", "Stream-Up-To-Date", "Stream-Closed", "Stream-Cursor"),
)
MAX_AGE_S = 600
MAX_HEADERS_CHARS = 4096

_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")


class Cors:
    """Marks the answers to ``allowed`` origins, where ``*`` is every origin."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(allowed)

    def marks(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Headers for the answer to a request that has an origin."""
        marks = [(b"vary", b"Origin")]
        if self._allows(headers["origin"]):
            marks.append((b"access-control-allow-origin", headers["origin"].encode("latin-1")))
            marks.append((b"access-control-expose-headers", ", ".join(EXPOSED).encode()))
        return marks

    def is_preflight(self, scope: Scope, headers: Headers) -> bool:
        return scope["method"] == "OPTIONS" and "access-control-request-method" in headers

    def preflight(self, headers: Headers) -> Response:
        """The answer to a preflight. Raises `ForeignOrigin` or `MethodNotAllowed`."""
        if not self._allows(headers["origin"]):
            raise ForeignOrigin
        if headers["access-control-request-method"] not in METHODS:
            raise MethodNotAllowed
        allowed = {
            "access-control-allow-methods": ", ".join(METHODS),
            "access-control-max-age": str(MAX_AGE_S),
        }
        wanted = headers.get("access-control-request-headers", "")
        if len(wanted) <= MAX_HEADERS_CHARS and _NAMES.fullmatch(wanted):
            allowed["access-control-allow-headers"] = wanted
        return Response(status_code=200, headers=allowed)

    def _allows(self, origin: str) -> bool:
        return "*" in self._allowed or origin in self._allowed


# -------------------------------------------------------------------------------------------------
# Which names a server answers to: without keys, only those that an attacker cannot point at it.
#
# DNS rebinding: a page of evil.example lets its name point to 127.0.0.1 and asks this server as
# its own origin. A browser sends the name as the Host, so the Host shows it.


logger = logging.getLogger("everstream.connections")

#: Probes come by any name, and learn a single word.
PROBES = frozenset({"/health", "/ready"})
#: What a proxy adds to the requests that it forwards.
OF_PROXIES = ("x-forwarded-for", "forwarded", "via")
#: Logged once: a proxy that does not forward the Host hides the names that are asked.
PROXY_WITHOUT_KEYS = (
    "a proxy forwards requests to this server, which has no keys: all that can reach the"
    " proxy may use it; set EVERSTREAM_API_KEYS (docs/operate/proxy.md)"
)


class HostCheck:
    """Knows the names that are ``allowed``, which may have ``*``: every name."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._saw_proxy = False

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises `ForeignHost` for a name other than those, localhost or an address."""
        if not self._saw_proxy and any(name in headers for name in OF_PROXIES):
            self._saw_proxy = True
            logger.warning(PROXY_WITHOUT_KEYS)
        name = name_of(headers.get("host", ""))
        is_ours = name == "localhost" or not {name, "*"}.isdisjoint(self._allowed)
        if not is_ours and not is_address(name) and scope["path"] not in PROBES:
            logger.warning("Host %r refused: a server without keys needs --allow-host", name)
            raise ForeignHost


def name_of(host: str) -> str:
    """The name in a well-formed Host, without its port and its last dot."""
    name = host if host.endswith("]") else host.rpartition(":")[0] if ":" in host else host
    return name.removesuffix(".").lower()


def is_address(name: str) -> bool:
    """Whether it is an IP address, which no name server can change."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


# -------------------------------------------------------------------------------------------------
# Bounds on what a peer may make the server hold: the bytes of a body, and its time.


BODY_TIMEOUT_S = 8.0


class BodyLimit:
    """At most ``max_bytes`` in ``timeout_s``; ``of_paths`` take bodies of another size."""

    def __init__(
        self,
        max_bytes: int,
        timeout_s: float = BODY_TIMEOUT_S,
        of_paths: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._of_paths = of_paths or {}

    def bounded(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """``receive`` that raises `BodyTooLarge` or `RequestTimeout`; the app answers with them.

        Raises `UnsupportedEncoding` or `BodyTooLarge` itself for a body that its head announces.
        """
        if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise UnsupportedEncoding
        of_path = self._of_paths.get(scope["path"])
        max_bytes = self._max_bytes if of_path is None else of_path()
        if int(headers.get("content-length", "0")) > max_bytes:
            raise BodyTooLarge(max_bytes)

        deadline = asyncio.get_running_loop().time() + self._timeout_s
        num_bytes = 0
        complete = False

        async def bounded() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout from None
            num_bytes += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if num_bytes > max_bytes:
                raise BodyTooLarge(max_bytes)
            return message

        return bounded


# -------------------------------------------------------------------------------------------------
# The client's address behind proxies that the operator trusts: they say it in X-Forwarded-For.
#
# Anybody else could write anything there, so from other peers the header is ignored.


class TrustedProxies:
    """Knows the addresses of ``networks``, each an address or a network such as 10.0.0.0/8."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks = [ipaddress.ip_network(network, strict=False) for network in networks]

    def __contains__(self, host: object) -> bool:
        address = _address(str(host))
        return address is not None and any(address in network for network in self._networks)

    def client_of(self, peer: str, forwarded_for: Iterable[str]) -> str:
        """The address that the first proxy was asked from, as the trusted ones say.

        Each proxy appends the address that it was asked from. What stands before an address
        that is not trusted may be invented, and does not count.
        """
        client = peer
        entries = [entry for value in forwarded_for for entry in value.split(",")]
        for entry in reversed(entries):
            address = _address(_without_port(entry.strip()))
            if client not in self or address is None:
                break
            client = str(address)
        return client


class Forwarded:
    """Pure ASGI: what comes through ``proxies`` has the address of its client."""

    def __init__(self, app: ASGIApp, proxies: TrustedProxies) -> None:
        self._app, self._proxies = app, proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if client and client[0] in self._proxies:
            values = Headers(scope=scope).getlist("x-forwarded-for")
            scope = {**scope, "client": (self._proxies.client_of(client[0], values), 0)}
        await self._app(scope, receive, send)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = None if isinstance(address, ipaddress.IPv4Address) else address.ipv4_mapped
    return mapped or address


def _without_port(entry: str) -> str:
    """Some proxies add the port, to an IPv6 address after brackets."""
    if entry.startswith("["):
        return entry[1:].partition("]")[0]
    return entry.partition(":")[0] if entry.count(":") == 1 else entry


# -------------------------------------------------------------------------------------------------
# A line of the log for each request, where it is asked for: who, what, how it ended, how long.
#
# Never a query, a header or a body: these have keys and prompts.


access_logger = logging.getLogger("everstream.access")

MAX_PATH_CHARS = 200


class AccessLog:
    """Pure ASGI. A WebSocket's line comes when it has ended, with 101 or what refused it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        begun_s = time.monotonic()
        status: int | None = None

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "websocket.accept":
                status = 101
            elif message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            fields = _request(scope) | {"status": status}
            took_s = round(time.monotonic() - begun_s, 3)
            access_logger.info("request", extra=fields | {"duration_s": took_s})


def _request(scope: Scope) -> dict[str, str]:
    client = scope.get("client")
    return {
        "client": client[0] if client else "",
        "method": scope.get("method", "WEBSOCKET"),
        "path": scope["path"][:MAX_PATH_CHARS],
    }


# -------------------------------------------------------------------------------------------------
# The span of each request of the API, where traces are asked for.


# -------------------------------------------------------------------------------------------------
# OpenAI's routes for clients whose base URL lacks the version.


#: Each with what may follow it.
UNVERSIONED = re.compile(
    r"/(chat/completions|completions|embeddings|models(/[^/]+)?|responses(/.*)?)", re.ASCII
)


class Versioned:
    """Pure ASGI: ``app`` sees ``/chat/completions`` as ``/v1/chat/completions``, and so on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and UNVERSIONED.fullmatch(scope["path"]):
            raw = scope.get("raw_path")
            raw_path = None if raw is None else b"/v1" + raw
            scope = {**scope, "path": f"/v1{scope['path']}", "raw_path": raw_path}
        await self._app(scope, receive, send)


# Pages, probes and scrapes are not worth a span.
PREFIX = ("/v1/", "/api/", "/completion", "/infill")


def traced(app: ASGIApp, tracer: Tracer) -> ASGIApp:
    """``app`` with a span around each request, or ``app`` itself where ``tracer`` is off."""
    return app if tracer is OFF else Traced(app, tracer)


class Traced:
    """Pure ASGI, and the first to see a request, so that refusals have a span as well."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        with self._tracer.request(scope) as span:

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.responded(message["status"])
                await send(message)

            await self._app(scope, receive, watched)


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
# Pure ASGI, for HTTP and WebSockets alike. Most checks are above; the order is here.


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
