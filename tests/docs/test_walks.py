"""The traces of docs/walks.py, on real servers."""

from __future__ import annotations

import pytest

from docs.walks import Place, Walk, walks
from server.config import ModelSource
from tests.postgres import Postgres
from tests.tiny import write_model

#: What every walk passes through, on its way to the engine and back.
WAY_STATIONS = {
    Place("server/runtime/queues.py", "CommandQueue.post"),
    Place("server/engine/engine.py", "Engine.step"),
    Place("model/native/runtime.py", "Runtime.run"),
    Place("server/runtime/queues.py", "EventQueue.put"),
}


@pytest.fixture(scope="module")
def traced(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Walk]:
    model = write_model(tmp_path_factory.mktemp("model"))
    return walks(ModelSource("tiny", str(model)), postgres.new_database())


def test_every_walk_goes_from_the_socket_to_the_kernel_and_back(traced: dict[str, Walk]) -> None:
    assert set(traced) == {"completion", "resume", "take-over"}
    for name, walk in traced.items():
        assert {place for hop in walk.all for place in hop} >= WAY_STATIONS, name
        assert 0 < len(walk.path) < len(walk.all), name


def test_only_the_take_over_asks_another_replica(traced: dict[str, Walk]) -> None:
    asking = {
        name
        for name, walk in traced.items()
        if any(place.file.startswith("server/cluster/") for hop in walk.path for place in hop)
    }
    assert asking == {"take-over"}
