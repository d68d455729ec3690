"""Ray's proxy: what our requests need of it, and our side of it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import parse_qs

import ray
import ray.util
from ray._private.worker import global_worker
from ray.exceptions import RayError
from ray.serve._private import api, client
from ray.serve._private.constants import SERVE_NAMESPACE, SERVE_PROXY_NAME
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# -------------------------------------------------------------------------------------------------
# What our requests need of Ray's proxy, in the proxy's own process.
#
# Ray's proxy imports `middlewares` where the environment that Ray was started in says
# ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=server.cluster.ray.proxy:middlewares``.
# Without it all works, but sessions are found only by the header, and a client that
# never reads is held for as long as it likes.


#: Serve's name for it; see ``RAY_SERVE_SESSION_ID_HEADER_KEY``.
SESSION_HEADER = b"x-session-id"
#: By these a client would tell Ray's proxy when to give up, which is ours to say.
REFUSED_HEADERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
#: How long a client may take what waits for it, before it counts as gone.
SEND_TIMEOUT_S = 20.0

_SESSION = re.compile(r"sess_[0-9a-z]{1,59}", re.ASCII)
_PATH = re.compile(r"/v1/sessions/([^/]+)(?:/|$)")


def middlewares() -> list[Middleware]:
    """For Serve, the innermost first."""
    return [Middleware(SessionHint), Middleware(Patience)]


class SessionHint:
    """Puts the session that path, query or header name into the header that the router sees.

    The path is the truth. ``?session=`` is for what names its session only in a body
    or in a frame: `/v1/stream` and `/v1/completions`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope = {**scope, "headers": list(_hinted(scope))}
        await self._app(scope, receive, send)


def _hinted(scope: Scope) -> list[tuple[bytes, bytes]]:
    headers = [(name.lower(), value) for name, value in scope["headers"]]
    kept = [
        (name, value)
        for name, value in headers
        if name.replace(b"_", b"-") != SESSION_HEADER and name not in REFUSED_HEADERS
    ]
    session = _session_of(scope, dict(headers).get(SESSION_HEADER, b""))
    return kept if session is None else [*kept, (SESSION_HEADER, session.encode())]


def _session_of(scope: Scope, header: bytes) -> str | None:
    in_path = _PATH.match(scope["path"])
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"), max_num_fields=16)
    places = [in_path[1] if in_path else "", *query.get("session", ()), header.decode("latin-1")]
    return next((place for place in places if _SESSION.fullmatch(place)), None)


class Patience:
    """Takes a client for gone that has not read for ``timeout_s``.

    Between Ray's proxy and a replica nothing holds back a stream without a reader,
    so it would grow in the proxy's memory for as long as it runs.
    """

    def __init__(self, app: ASGIApp, timeout_s: float = SEND_TIMEOUT_S) -> None:
        self._app, self._timeout_s = app, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        gone = asyncio.Event()

        async def bounded_send(message: Message) -> None:
            if gone.is_set():
                return
            try:
                async with asyncio.timeout(self._timeout_s):
                    await send(message)
            except TimeoutError:
                gone.set()

        async def bounded_receive() -> Message:
            reading = asyncio.ensure_future(receive())
            leaving = asyncio.ensure_future(gone.wait())
            try:
                await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
                return reading.result() if reading.done() else _left(scope)
            finally:
                reading.cancel()
                leaving.cancel()

        await self._app(scope, bounded_receive, bounded_send)


def _left(scope: Scope) -> Message:
    if scope["type"] == "http":
        return {"type": "http.disconnect"}
    return {"type": "websocket.disconnect", "code": 1008, "reason": "the client reads too slowly"}


# -------------------------------------------------------------------------------------------------
# Our side of Ray's proxy: the bound that its sockets lack, and which replica answered.


REPLICA_HEADER = b"everstream-replica"


class Edge:
    """The application behind Ray's proxy, which takes messages of 16 MiB."""

    def __init__(self, app: ASGIApp, tag: str, max_message_bytes: int) -> None:
        self._app, self._tag, self._max_bytes = app, tag.encode(), max_message_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            receive = self._bounded(receive, send)
        await self._app(scope, receive, self._signed(send))

    def _signed(self, send: Send) -> Send:
        async def signed(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept"):
                headers = [*message.get("headers", ()), (REPLICA_HEADER, self._tag)]
                message = {**message, "headers": headers}
            await send(message)

        return signed

    def _bounded(self, receive: Receive, send: Send) -> Receive:
        async def bounded() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and _size(message) > self._max_bytes:
                await send({"type": "websocket.close", "code": 1009, "reason": "too large"})
                return {"type": "websocket.disconnect", "code": 1009}
            return message

        return bounded


def _size(message: Message) -> int:
    if message.get("bytes") is not None:
        return len(message["bytes"])
    text: str = message.get("text") or ""
    return len(text.encode())


# -------------------------------------------------------------------------------------------------
# What Serve has no settings for: slow proxies, draining before a stop, listening on one address.
#
# Serve stops a replica by waiting until it has no request, for a bounded time, and only
# then tells it. A stream that runs for hours would be cut off at the end of that time,
# while ours can move at once. And each replica has a gRPC server, for calls between
# deployments, that listens on every address of the machine; ours needs none. The
# process that starts Serve waits one minute for the proxy, which is too short on a busy machine.
# It ends a proxy without asking whether that has passed on what the replicas have sent.
#
# This is the one module that reaches into Serve. The tests of the scale-down, of the end of a
# cluster, of the open ports and of a slow proxy fail where Serve has changed.


logger = logging.getLogger("everstream.ray")

DRAINED_CHECK_S = 0.05
#: For requests that this replica has accepted and whose body is still on its way from the proxy.
SETTLE_S = 1.0

_EVERYWHERE = "[::]:"


def wait_for_proxies(timeout_s: float) -> None:
    """Has `serve.start` and `serve.run` wait up to ``timeout_s`` for the proxies of all nodes.

    They raise TimeoutError after that. Both read the limit from their own module.
    """
    for module in (api, client):
        assert hasattr(module, "HTTP_PROXY_TIMEOUT"), f"{module.__name__} has another limit"
        setattr(module, "HTTP_PROXY_TIMEOUT", timeout_s)  # noqa: B010 - not a name that it exports


def drain_proxies(timeout_s: float) -> None:
    """Returns when the proxies have passed on all that the replicas, which have ended, sent.

    Or after about ``timeout_s``. The environment of our own clusters shortens the 30 s for which
    Serve has a proxy drain at least.
    """
    logger.info("the replicas have ended; their last words may be on their way")
    until_s = time.monotonic() + timeout_s
    actors = ray.util.list_named_actors(all_namespaces=True)
    proxies = [
        ray.get_actor(actor["name"], actor["namespace"])
        for actor in actors
        if actor["namespace"] == SERVE_NAMESPACE and actor["name"].startswith(SERVE_PROXY_NAME)
    ]
    # Answered with None, so that what follows asks each at least once.
    asked: list[Any] = [proxy.update_draining.remote(True) for proxy in proxies]
    try:
        while not all(ray.get(asked, timeout=max(0.0, until_s - time.monotonic()))):
            time.sleep(DRAINED_CHECK_S)
            asked = [proxy.is_drained.remote() for proxy in proxies]
    except RayError as error:
        logger.warning("a proxy was not waited for: %s", error)


def drain_on_stop(drain: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Has Serve await ``drain``, in the caller's event loop, when it begins to stop this replica.

    Serve's routers are turned away before that, and try other replicas: no client sees
    that a replica drains, while there is another.
    """
    loop = asyncio.get_running_loop()
    replica = _replica()
    stop: Callable[[], Awaitable[None]] = replica._perform_graceful_shutdown
    assert hasattr(replica, "_quiescing"), "this version of Ray Serve has no _quiescing"

    async def drain_and_stop() -> None:
        replica._quiescing = True
        await asyncio.sleep(SETTLE_S)
        try:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(drain(), loop))
        finally:
            await stop()

    replica._perform_graceful_shutdown = drain_and_stop


def listen_within_cluster() -> None:
    """Binds the gRPC server of this replica, which is not yet open, to the address of its node."""
    server = _replica()._server
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    within = f"[{host}]:" if ":" in host else f"{host}:"
    for name in ("add_insecure_port", "add_secure_port"):
        setattr(server, name, _bound(getattr(server, name), within))


def _bound(add: Callable[..., int], within: str) -> Callable[..., int]:
    def add_port(address: str, *credentials: object) -> int:
        return add(address.replace(_EVERYWHERE, within), *credentials)

    return add_port


def _replica() -> Any:
    """Serve's object for the one replica of this process."""
    (actor,) = global_worker.actors.values()
    return actor._replica_impl
