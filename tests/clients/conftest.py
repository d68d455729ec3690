"""A real `everstream serve` process over a tiny real model, one for all tests of this folder."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from model.checkpoint import save_checkpoint
from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    checkpoint = tiny_checkpoint()
    save_checkpoint(folder, checkpoint.model, checkpoint.tokenizer)
    command = [sys.executable, "-m", "server.main", "serve", "--model", str(folder)]
    command += ["--store", "memory", "--sleep-memory", "0"]  # full at 16 sessions
    yield from serving([*command, "--port", "0", "--threads", "1", "--max-sessions", "16"], folder)


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
