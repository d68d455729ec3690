"""The commands of docs/start/first-chat.md, in their order, with a hub and a model made here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from model.tokenization.world import PADDED_SIZE
from tests.docs.blocks import blocks_of
from tests.docs.pages import DOCS
from tests.docs.serving import serving
from tests.docs.test_shell import ADDRESS
from tests.hub_server import Repository, hub_server
from tests.reserved_port import ReservedPort
from tests.rwkv7 import SHAPES, published, write_pth

pytestmark = pytest.mark.process

PULL, SERVE, CHAT, START, _KILL, READ = (
    block.text for block in blocks_of(DOCS / "start" / "first-chat.md") if block.language == "sh"
)
EVERSTREAM = [sys.executable, "-m", "server.cli.main"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("hub")
    shape = replace(SHAPES["odd"], vocab_size=PADDED_SIZE)
    model = write_pth(folder / "model.pth", published(shape))
    _, repository, file = shlex.split(PULL.splitlines()[0].replace(" --file", ""))[1:]
    with hub_server() as hub:
        hub.repositories[repository] = Repository({file: model.read_bytes()})
        yield {**os.environ, **hub.environment(folder / "home")}


@pytest.fixture
def port() -> Iterator[int]:
    """For the server and its successor."""
    with ReservedPort() as reserved:
        yield reserved.number


def test_commands_lead_to_a_response_that_continues_after_a_kill(
    environment: dict[str, str], port: int, tmp_path: Path
) -> None:
    def shell(block: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", block.replace(ADDRESS, f"http://127.0.0.1:{port}")],
            cwd=tmp_path,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout

    serve = [*EVERSTREAM, *shlex.split(SERVE)[1:], "--port", str(port), "--threads", "1"]
    for line in PULL.splitlines():
        words = [*EVERSTREAM, *shlex.split(line)[1:]]
        subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True)
    with serving(serve, tmp_path, environment):
        (choice,) = json.loads(shell(CHAT))["choices"]
        assert choice["message"]["role"] == "assistant"
        response_id = shell(f'{START}\necho "$ID"').strip()
    with serving(serve, tmp_path, environment):
        stream = shell(f"ID={response_id}\n{READ}")
    events = [json.loads(data) for data in re.findall(r"(?m)^data: (\{.*)$", stream)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] in {"response.completed", "response.incomplete"}
    assert events[-1]["response"]["id"] == response_id
