from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from server.cluster.ray.application import NAME, Replica, build
from server.config import ConfigError

FILE = Path(__file__).parents[4] / "deploy" / "ray" / "serve.yaml"


# Ray's own: see `server.cluster.ray.application`.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The `metrics_interval_s` field in AutoscalingConfig is deprecated:DeprecationWarning"
)


def deployment(**settings: Any) -> Any:
    return build({"store": "memory", **settings})._bound_deployment


def test_file_is_what_serve_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTREAM_STORE", "postgresql://everstream@127.0.0.1/everstream")
    schema = ServeDeploySchema.model_validate(yaml.safe_load(FILE.read_text()))
    (application,) = schema.applications
    assert application.import_path == f"{build.__module__}:{build.__name__}"
    assert (application.name, application.route_prefix) == (NAME, "/")
    assert schema.http_options.host == "127.0.0.1"
    assert build(application.args)._bound_deployment.name == NAME


def test_folder_is_for_one_replica(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a folder serves one process"):
        deployment(store=str(tmp_path), replicas="1-2")
    assert deployment(store=str(tmp_path), replicas="1").name == NAME


def test_ray_is_given_names_and_plain_data_of_ours() -> None:
    made = deployment(replicas="1-3", target_streams=7)
    assert made.init_args == ({"store": "memory", "replicas": "1-3", "target_streams": 7},)
    # By name, where it is imported: nothing of ours is pickled.
    assert made.func_or_class is Replica
    router = made._deployment_config.request_router_config
    assert router.request_router_class == "server.cluster.ray.proxy:SessionRouter"
    policy = made._deployment_config.autoscaling_config.policy
    assert policy.policy_function == "server.cluster.ray.proxy:StreamsPolicy"
    assert policy.policy_kwargs == {"target_streams": 7}


def test_fixed_number_does_not_follow_the_load() -> None:
    made = deployment(replicas="3")
    assert made._deployment_config.num_replicas == 3
    assert made._deployment_config.autoscaling_config is None


def test_replica_gets_the_time_that_its_drain_takes() -> None:
    made = deployment(drain_timeout_s=40)
    assert made._deployment_config.graceful_shutdown_timeout_s > 40


def test_sockets_do_not_fill_a_replica() -> None:
    """Serve's default is five requests at once."""
    assert deployment(max_connections=1000)._deployment_config.max_ongoing_requests == 1000


def test_mistake_is_said_before_a_replica_starts() -> None:
    with pytest.raises(ConfigError, match="--threads"):
        deployment(threads=0)
