"""ASGI middleware around the routes: origins, names, bounds, addresses, the access log, spans."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import (
    BodyTooLarge,
    ForeignHost,
    ForeignOrigin,
    MethodNotAllowed,
    RequestTimeout,
    UnsupportedEncoding,
)
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
