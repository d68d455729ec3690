"""Everstream on a real Ray cluster of several processes, for all tests of this folder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    # Ray Serve's own, on its import.
    warnings.filterwarnings(
        "ignore", r"Using extra keyword arguments on `Field` .*\(Extra keys: 'update_type'\)"
    )
    import ray.serve  # noqa: F401

from tests.reliability.servers import ServerProcess
from tests.server.cluster.ray.clusters import KEY, OnRay
from tests.tiny import write_model


@pytest.fixture(scope="package")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    """Two replicas that keep sessions in memory, and want a key."""
    model = write_model(tmp_path_factory.mktemp("ray") / "model")
    flags = ("--model", f"tiny={model}", "--store", "memory", "--api-key", KEY)
    with OnRay(ServerProcess("--ray", "--replicas", 2, *flags)) as server:
        yield server
