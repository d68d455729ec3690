"""The walks of the architecture page: traced on real servers, and naming functions that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from docs.walks import Place, Walk, walks
from server.config.sources import ModelSource
from tests.docs.pages import DOCS, page, section
from tests.postgres import Postgres
from tests.tiny import write_model

ROOT = DOCS.parent
#: What every walk passes through, on its way to the engine and back.
WAY_STATIONS = {
    Place("server/runtime/command_queue.py", "CommandQueue.post"),
    Place("server/engine/engine.py", "Engine.step"),
    Place("model/native/runtime.py", "Runtime.run"),
    Place("server/runtime/event_queue.py", "EventQueue.put"),
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


@pytest.mark.parametrize("name", ["A completion", "A resume", "A take-over"])
def test_functions_that_the_page_names_exist(name: str) -> None:
    found = re.findall(r"`([\w/]+\.py):([\w.]+)`", section(page("architecture.md"), name))
    assert len(found) > 10
    missing = [f"{path}:{function}" for path, function in found if not exists(path, function)]
    assert missing == []


def exists(path: str, function: str) -> bool:
    """Whether the module at ``path`` has ``function``, which may be one of a class."""
    if not (ROOT / path).is_file():
        return False
    found: object = importlib.import_module(".".join(Path(path).with_suffix("").parts))
    for part in function.split("."):
        found = getattr(found, part, None)
    return callable(found) or isinstance(found, property)
