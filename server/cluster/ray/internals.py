"""What Serve has no settings for, and our side of its proxy, in a replica's process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import ray
import ray.util
from ray._private.worker import global_worker
from ray.exceptions import RayError
from ray.serve._private import api, client
from ray.serve._private.constants import SERVE_NAMESPACE, SERVE_PROXY_NAME
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
