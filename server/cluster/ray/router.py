"""Which replica gets a request: the one that holds its session, if that can take it.

Serve calls a router of ours for each request, in the proxy. That was chosen over
Serve's multiplexing, which keeps a table of "model ids" for each replica: it would
have to hold every session, is told to all routers whenever one comes or goes, and
waits a second for a holder that is busy. Here there is no table. The name of a
session begins with the tag of the replica that made it, and that one is preferred
while it lives. Where it does not, all routers agree on another by rendezvous hashing
(Thaler and Ravishankar, 1998): the replica with the highest hash of both names. A
replica that comes or goes changes that for as few sessions as can be.

It is a preference only. Whichever replica gets the request takes the session over
from the shared store. A router sees no body and no frame, only the hint that
`server.cluster.ray.proxy` has put into the session header.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

TAG_CHARS = 8
#: A session's name with a tag: `server.models.factory` makes it of `ServerConfig.session_tag`.
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
