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
from typing import Self

import pytest

from model.tokenization.world import PADDED_SIZE
from tests.docs.blocks import blocks_of
from tests.docs.pages import DOCS, flowed, page
from tests.docs.serving import serving
from tests.docs.test_shell import ADDRESS
from tests.hub_server import Repository, hub_server
from tests.reserved_port import ReservedPort
from tests.rwkv7 import SHAPES, published, write_pth

pytestmark = pytest.mark.process

PULL, SERVE, CHAT, START, KILL, READ = (
    block.text for block in blocks_of(DOCS / "start" / "first-chat.md") if block.language == "sh"
)
RESULTS = DOCS.parent / "benchmarks" / "results"


class Shell:
    """The reader's terminal, in ``folder``; what runs in its background ends with the block."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, environment

    def __enter__(self) -> Self:
        with (self._folder / "errors").open("w") as errors:
            self._process = subprocess.Popen(
                ["bash", "-e"],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate("kill -9 $SERVER\n")

    def run(self, block: str, until: str = "the end of the block") -> str:
        """What it prints up to a line that has ``until``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{block}\necho; echo the end of the block\n")
        self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if until in line:
                return "".join(lines)
            lines.append(line)
        errors = (self._folder / "errors").read_text("utf-8")
        raise AssertionError(f"{block}\n{''.join(lines)}\n{errors}")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """With the model on the hub, and `everstream` on the path, a process of that name."""
    folder = tmp_path_factory.mktemp("hub")
    shape = replace(SHAPES["odd"], vocab_size=PADDED_SIZE)
    model = write_pth(folder / "model.pth", published(shape))
    _, repository, file = shlex.split(PULL.splitlines()[0].replace(" --file", ""))[1:]
    program = folder / "bin" / "everstream"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom server.cli.main import main\nmain()\n", "utf-8")
    program.chmod(0o755)
    with hub_server() as hub, ReservedPort() as port:
        hub.repositories[repository] = Repository({file: model.read_bytes()})
        yield {
            **os.environ,
            **hub.environment(folder / "home"),
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "EVERSTREAM_PORT": str(port.number),
            "EVERSTREAM_THREADS": "1",
        }


def test_commands_lead_to_a_response_that_continues_after_a_kill(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Another server of the machine, newer than the reader's, is not killed."""
    there = f"http://127.0.0.1:{environment['EVERSTREAM_PORT']}"
    chat, start, read = (block.replace(ADDRESS, there) for block in (CHAT, START, READ))
    other = ["everstream", "serve", "--port", "0", "--store", "memory"]
    (tmp_path / "other").mkdir()
    with Shell(tmp_path, environment) as shell:
        shell.run(PULL)
        shell.run(SERVE, until="completions")
        (answer,) = re.findall(r"(?m)^\{.*", shell.run(chat))
        (choice,) = json.loads(answer)["choices"]
        assert choice["message"]["role"] == "assistant"
        (response_id,) = re.findall(r"resp_\w+", shell.run(f"{start}\necho $ID"))
        with serving(other, tmp_path / "other", environment) as bystander:
            shell.run(f"{KILL}\nwait $SERVER || true")
            assert bystander.poll() is None
        shell.run(SERVE, until="completions")
        stream = shell.run(read)
    events = [json.loads(data) for data in re.findall(r"(?m)^data: (\{.*)$", stream)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] in {"response.completed", "response.incomplete"}
    assert events[-1]["response"]["id"] == response_id


def test_memory_is_that_of_the_results() -> None:
    sizes = json.loads((RESULTS / "checkpoint_sizes.json").read_text("utf-8"))["sizes"]
    (row,) = (row for row in sizes if row["size"] == "1.5B")
    steady = {loaded["dtype"]: loaded["steady_bytes"] / 1e9 for loaded in row["loading"]}
    text = flowed(page("first-chat.md"))
    assert f"in int8, the model takes {steady['int8']:.1f} GB" in text
    assert f"in bfloat16 {steady['bfloat16']:.1f} GB" in text
    assert f"adds {row['state_bytes'] / 1e6:.0f} MB" in text
