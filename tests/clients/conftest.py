"""A real `everstream serve` process over a tiny real model, one for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from model.checkpoint import load_checkpoint
from server.cli.state import read_prompt, write_state
from server.models.backend import open_backend
from server.models.storage import identity_of
from tests.chosen_model import served_model
from tests.reliability.servers import ServerProcess

#: What the named state ``wood`` has read.
WOOD = "Once upon a time there was a wood."


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    model = served_model(folder)
    write_state_of(model, folder / "wood.state")
    flags = ("--model", model, "--state", f"wood={folder / 'wood.state'}", "--threads", 1)
    flags += ("--store", "memory", "--sleep-memory", 0, "--max-sessions", 16)  # full at 16
    with ServerProcess(*flags) as server:
        yield server.url
        assert server.stop() == 0, server.log()


def write_state_of(model: Path, file: Path) -> None:
    """The state that has read `WOOD`."""
    checkpoint = load_checkpoint(model)
    backend = open_backend(checkpoint, threads=1)
    write_state(file, read_prompt(backend, WOOD), identity_of(checkpoint, backend))
