"""A real `everstream serve` process over a tiny real model, one for all tests of this folder."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from model.checkpoint import load_checkpoint, save_checkpoint
from server.cli.state_making import read_prompt, write_state
from server.models.backend import open_backend
from server.models.storage import identity_of
from tests.tiny import tiny_checkpoint

#: What the named state ``wood`` has read.
WOOD = "Once upon a time there was a wood."


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    checkpoint = tiny_checkpoint()
    save_checkpoint(folder, checkpoint.model, checkpoint.tokenizer)
    write_state_of(folder, folder / "wood.state")
    command = [sys.executable, "-m", "server.cli.main", "serve", "--model", str(folder)]
    command += ["--state", f"wood={folder / 'wood.state'}"]
    command += ["--store", "memory", "--sleep-memory", "0"]  # full at 16 sessions
    yield from serving([*command, "--port", "0", "--threads", "1", "--max-sessions", "16"], folder)


def write_state_of(model: Path, file: Path) -> None:
    """The state that has read `WOOD`."""
    checkpoint = load_checkpoint(model)
    backend = open_backend(checkpoint, threads=1)
    write_state(file, read_prompt(backend, WOOD), identity_of(checkpoint, backend))


def serving(command: list[str], folder: Path) -> Iterator[str]:
    """Starts the server, gives its address once it is ready, and ends it."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = next(line for line in iter(process.stdout.readline, "") if "curl" in line)
            found = re.search(r"http://[^/]+", line)
            assert found, line
            with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as client:
                assert client.get(f"{found[0]}/ready").status_code == 200
            yield found[0]
            process.terminate()
            assert process.wait(30) == 0, (folder / "log").read_text()
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
