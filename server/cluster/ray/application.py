"""The Serve application and its replicas, for `serve run` and for `everstream serve --ray`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

from server.api.app import create_app
from server.api.connections import DEFAULT_MAX_CONNECTIONS
from server.cluster.ray.internals import Edge, drain_on_stop, listen_within_cluster
from server.cluster.ray.proxy import (
    LOOK_BACK_S,
    METRICS_INTERVAL_S,
    STREAMS,
    UPSCALE_DELAY_S,
    tag_of,
)
from server.config import (
    TRANSPOSED,
    ConfigError,
    ModelSource,
    ServerConfig,
    StateSource,
    state_file,
)
from server.http.server import drain
from server.models.build import build_models
from server.models.registry import Models
from server.models.storage import Shared
from server.observability.logs import configure as configure_logs
from server.observability.tracing import open_tracer

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


NAME = "everstream"
#: For what follows a drain: cancelled requests end, sockets close, the store is closed.
STOP_MARGIN_S = 20.0

_HERE = "server.cluster.ray"


def build(settings: Settings) -> Application:
    """Replicas with these settings, which are the ``args`` of a file. Raises `ConfigError`."""
    config = read_settings(settings)
    if config.num_replicas[1] > 1 and not (config.is_shared or config.store == "memory"):
        raise ConfigError(
            "--replicas: a folder serves one process; more than one replica needs "
            "--store postgresql://... (or --store memory, where each has sessions of its own)"
        )
    deployment = serve.deployment(
        name=NAME,
        ray_actor_options={"num_cpus": config.threads or 1},
        max_ongoing_requests=config.max_connections or DEFAULT_MAX_CONNECTIONS,
        graceful_shutdown_timeout_s=config.drain_timeout_s + STOP_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=1,
        request_router_config={"request_router_class": f"{_HERE}.proxy:SessionRouter"},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **_number(config),
    )
    return deployment(Replica).bind(settings)


def _number(config: ServerConfig) -> dict[str, Any]:
    fewest, most = config.num_replicas
    if fewest == most:
        return {"num_replicas": fewest}
    policy = {
        "policy_function": f"{_HERE}.proxy:StreamsPolicy",
        "policy_kwargs": {"target_streams": config.target_streams},
    }
    return {
        "autoscaling_config": {
            "min_replicas": fewest,
            "max_replicas": most,
            "metrics_interval_s": METRICS_INTERVAL_S,
            "look_back_period_s": LOOK_BACK_S,
            "upscale_delay_s": UPSCALE_DELAY_S,
            "downscale_delay_s": config.scale_down_delay_s,
            "policy": policy,
        }
    }
