"""What Ray's own processes import: our part of its proxy, the choice of a replica, their number.

Ray's proxy imports `middlewares` where the environment that Ray was started in says
``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=server.cluster.ray.proxy:middlewares``.
Without it all works, but sessions are found only by the header, and a client that
never reads is held for as long as it likes.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# -------------------------------------------------------------------------------------------------
# What our requests need of the proxy.

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
# Which replica gets a request: the one that holds its session, if that can take it.
#
# Serve calls a router of ours for each request, in the proxy. That was chosen over
# Serve's multiplexing, which keeps a table of "model ids" for each replica: it would
# have to hold every session, is told to all routers whenever one comes or goes, and
# waits a second for a holder that is busy. Here there is no table. The name of a
# session begins with the tag of the replica that made it, and that one is preferred
# while it lives. Where it does not, all routers agree on another by rendezvous hashing
# (Thaler and Ravishankar, 1998): the replica with the highest hash of both names. A
# replica that comes or goes changes that for as few sessions as can be.
#
# It is a preference only. Whichever replica gets the request takes the session over
# from the shared store. A router sees no body and no frame, only the hint that
# `server.cluster.ray.proxy` has put into the session header.


TAG_CHARS = 8
#: A session's name with a tag: `server.models.build` makes it of `ServerConfig.session_tag`.
_TAGGED = re.compile(r"sess_([0-9a-f]{8})[0-9a-f]{32}", re.ASCII)


def tag_of(replica: str) -> str:
    """What begins the sessions that the replica of this unique id makes."""
    return hashlib.sha256(replica.encode()).hexdigest()[:TAG_CHARS]


def ranked(session: str, replicas: Sequence[str]) -> list[str]:
    """The unique ids of ``replicas``, the one first that the session most likely is at."""
    found = _TAGGED.fullmatch(session)
    maker = found[1] if found else None

    def weight(replica: str) -> tuple[bool, bytes]:
        both = f"{session}\0{replica}".encode()
        return tag_of(replica) == maker, hashlib.sha256(both).digest()

    return sorted(replicas, key=weight, reverse=True)


class SessionRouter(RequestRouter):
    """Goes by the session where there is one, else by the shorter of two queues."""

    #: A replica that has not told the length of its queue by then is passed over, so that its
    #: session moves or is refused. Serve's own 0.1 s is too short where other work has the cores.
    queue_len_response_deadline_s = 2.0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, the better ones first; a full one passes the request on."""
        if pending_request is None or not (session := pending_request.metadata.session_id):
            chosen = [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        else:
            by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
            chosen = [[by_id[id]] for id in ranked(session, list(by_id))]
        if pending_request is not None:  # the next round, where all were full, may wait
            pending_request.routing_context.should_backoff = True
        return chosen


# -------------------------------------------------------------------------------------------------
# How many replicas there should be: as many as the streams that run or wait need.
#
# Serve would count open requests. A socket is one for as long as it is open, whatever
# runs on it, and one `append` of a long text is one too: the engines' own counts say
# more. Serve adds the bounds, the delays, and the average over the last seconds.


#: What a replica reports: `Replica.record_autoscaling_stats`.
STREAMS = "streams"

# Ray 2.60 calls the field deprecated, and does not yet read the variable that is to replace it.
METRICS_INTERVAL_S = 1.0
LOOK_BACK_S = 5.0
UPSCALE_DELAY_S = 2.0


class StreamsPolicy:
    """``target_streams`` for each replica, those that wait included."""

    def __init__(self, target_streams: int) -> None:
        self._target = target_streams

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The wanted number, and nothing to remember."""
        reported: Mapping[Any, float] = (context.aggregated_metrics or {}).get(STREAMS, {})
        if not reported:  # no replica has reported yet
            return context.target_num_replicas, {}
        return max(1, math.ceil(sum(reported.values()) / self._target)), {}
