"""One replica in a process of Ray's, which requests it gets, and how many there should be."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import random
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from server.api.app import create_app
from server.cluster.ray.proxy import Edge, drain_on_stop, listen_within_cluster
from server.config.settings import ServerConfig
from server.config.values import TRANSPOSED, ModelSource, StateSource, state_file
from server.http.server import drain
from server.models.build import build_models
from server.models.registry import Models
from server.models.storage import Shared
from server.observability.logs import configure as configure_logs
from server.observability.tracer import open_tracer

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


# -------------------------------------------------------------------------------------------------
# A configuration as plain data: all of ours that crosses to a replica, or comes from a file.
#
# A replica reads it over its own machine's `EVERSTREAM_*` variables, so that what is
# secret or differs by machine can stay there.


#: For the process that starts Ray, and for no replica.
OF_THE_CLUSTER = frozenset({"config", "host", "port", "ray", "ray_address"})

Settings = dict[str, Any]


def settings_of(config: ServerConfig) -> Settings:
    """What was chosen in ``config``, as JSON has it; paths are absolute."""
    chosen = config.model_dump(mode="json", exclude_unset=True, exclude=set(OF_THE_CLUSTER))
    if "model" in chosen:
        chosen["model"] = [text for source in config.model if (text := _text(source)) is not None]
        if not chosen["model"]:
            del chosen["model"]
    if "state" in chosen:
        chosen["state"] = [_state_text(state) for state in config.state]
    for name in ("keys_file", "model_dir"):
        if chosen.get(name) is not None:
            chosen[name] = str(Path(chosen[name]).absolute())
    if "lora" in chosen:
        chosen["lora"] = [str(path.expanduser().absolute()) for path in config.lora]
    return {name: value for name, value in chosen.items() if value is not None}


def read_settings(settings: Mapping[str, Any]) -> ServerConfig:
    """The configuration that `settings_of` wrote, or a person. Raises `ConfigError`."""
    flags: Settings = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    if isinstance(number := flags.get("replicas"), int):
        flags["replicas"] = str(number)
    return ServerConfig.load(**flags)


def _state_text(state: StateSource) -> str:
    """The state as the flag ``--state`` names it."""
    path, is_transposed = state_file(state.path)
    name = f"{state.model}/{state.name}" if state.model else state.name
    return f"{name}={TRANSPOSED if is_transposed else ''}{path.absolute()}"


def _text(source: ModelSource) -> str | None:
    """The source as the flag ``--model`` names it."""
    if source.source is None:
        return None
    place = source.source
    if Path(place).exists():
        place = str(Path(place).absolute())
    return f"{source.name}={place}" if source.is_named else place


# -------------------------------------------------------------------------------------------------
# One replica: the same application as `everstream serve` has, in a process of Ray's.


logger = logging.getLogger("everstream.replica")


class Unhealthy(Exception):
    """The engine or the store does not answer any more: Serve replaces the replica."""


@serve.ingress()
class Replica:
    """Built from `settings_of` a configuration; Serve calls the rest.

    The process ends with the thread of an engine or a store, as `everstream serve` does.
    """

    def __init__(self, settings: Settings) -> None:
        tag = tag_of(serve.get_replica_context().replica_id.unique_id)
        config = read_settings({**settings, "session_tag": tag})
        self._config = config if config.threads else config.model_copy(update={"threads": 1})
        self._watching: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> Edge:
        """Called by Serve in the event loop in which the application will run."""
        config = self._config
        configure_logs(
            config.log_format, config.log_level.upper(), keys=(*config.api_keys, *config.admin_keys)
        )
        ours = version("everstream")
        tracer = open_tracer(config.otel_endpoint, ours)
        self._models, builder = build_models(config, tracer, _shared(config))
        app = create_app(self._models, config, ours, tracer, builder)
        sockets = app.state.sockets

        async def stop() -> None:
            await drain(self._models, sockets, config.drain_timeout_s, asyncio.Event())

        drain_on_stop(stop)
        listen_within_cluster()
        self._watching = asyncio.create_task(_leave_when_dead(self._models))
        return Edge(app, config.session_tag, config.max_message_bytes)

    def check_health(self) -> None:
        """Raises where the replica cannot continue."""
        if not self._models.healthy:
            raise Unhealthy

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What runs here, or waits to: for `StreamsPolicy`."""
        stats = [await each.async_engine.stats() for each in self._models.versions]
        return {STREAMS: float(sum(each.num_running + each.num_waiting for each in stats))}


def _shared(config: ServerConfig) -> Shared | None:
    if not config.is_shared:
        return None
    from server.cluster.shared import Cluster  # needs the packages of the extra `postgres`

    return Cluster(config)


async def _leave_when_dead(models: Models) -> None:
    """Serve would ask for its health only every few seconds, and keep a fenced replica."""
    await models.died.wait()
    logger.error("an engine stopped unexpectedly; the process exits")
    logging.shutdown()
    os._exit(1)
