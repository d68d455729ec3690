"""Which replica gets a request, and how many there should be: what Ray's own processes import."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

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
