"""The Serve application, for `serve run` with a file and for `everstream serve --ray`."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from server.api.connections import DEFAULT_MAX_CONNECTIONS
from server.cluster.ray.replica import Replica, Settings, read_settings
from server.cluster.ray.router import LOOK_BACK_S, METRICS_INTERVAL_S, UPSCALE_DELAY_S
from server.config.settings import ConfigError, ServerConfig

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
        request_router_config={"request_router_class": f"{_HERE}.router:SessionRouter"},
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **_number(config),
    )
    return deployment(Replica).bind(settings)


def _number(config: ServerConfig) -> dict[str, Any]:
    fewest, most = config.num_replicas
    if fewest == most:
        return {"num_replicas": fewest}
    policy = {
        "policy_function": f"{_HERE}.router:StreamsPolicy",
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
