"""One replica: the same application as `everstream serve` has, in a process of Ray's."""

from __future__ import annotations

import asyncio
import logging
import os
from importlib.metadata import version

from ray import serve

from server.api.app import create_app
from server.cluster.ray.edge import Edge
from server.cluster.ray.internals import drain_on_stop, listen_within_cluster
from server.cluster.ray.router import tag_of
from server.cluster.ray.scaling import STREAMS
from server.cluster.ray.settings import Settings, read_settings
from server.config.settings import ServerConfig
from server.http.server import drain
from server.models.factory import build_models
from server.models.registry import Models
from server.models.storage import Shared
from server.observability.logs import configure as configure_logs
from server.observability.tracer import open_tracer

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
    from server.cluster.cluster import Cluster  # needs the packages of the extra `postgres`

    return Cluster(config)


async def _leave_when_dead(models: Models) -> None:
    """Serve would ask for its health only every few seconds, and keep a fenced replica."""
    await models.died.wait()
    logger.error("an engine stopped unexpectedly; the process exits")
    logging.shutdown()
    os._exit(1)
