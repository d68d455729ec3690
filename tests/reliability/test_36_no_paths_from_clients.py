"""36: no name that a client sends is a path or an address: refused, and nothing is opened."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.history import History
from tests.reliability.hostile_names import quiet
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ROOT, ServerProcess
from tests.reliability.soloist import Soloist
from tests.reliability.streams import ENDLESS, KeptStream, kept_streams, tiny_server
from tests.requirements import needs_namespaces

REFUSALS = {
    (400, "invalid_value"),
    (404, "model_not_found"),
    (404, "session_not_found"),
    (404, "not_found"),
    (404, None),
    (405, "method_not_allowed"),
}


def answers_of(told: Any) -> dict[str, tuple[int, str | None]]:
    return {question: (status, code) for question, (status, code) in told["answers"].items()}


def test_every_name_is_refused() -> None:
    command = [sys.executable, "-m", "tests.reliability.hostile_names"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    answers = answers_of(told)
    assert len(answers) > 100
    wrong = {name: answer for name, answer in answers.items() if answer not in REFUSALS}
    assert not wrong
    assert "Traceback" not in told["log"]


@needs_namespaces("--net")
def test_no_connection_outside_is_attempted() -> None:
    """Where nothing leads outside the answers are the same, without an attempt to get there."""
    told = quiet("--quiet")
    assert set(answers_of(told).values()) <= REFUSALS
    # One connection for each question over HTTP, and one socket: all of them the client's.
    counts = told["counts"]
    assert counts["Ip:OutNoRoutes"] == counts["Udp:OutDatagrams"] == counts["Udp:NoPorts"] == 0
    assert counts["Tcp:ActiveOpens"] == told["num_connections"]


@needs_namespaces("--net")
def test_network_access_would_be_detected() -> None:
    assert quiet("--quiet", "--connect")["counts"]["Ip:OutNoRoutes"] > 0


async def interrupted(server: ServerProcess, history: History) -> KeptStream:
    """A session in the middle of a generation, whose state is on the disk."""
    odometer = Odometer()
    (stream,) = kept_streams(1, history, odometer, max_tokens=ENDLESS)
    reading = asyncio.create_task(stream.run(server.stream_url))
    await odometer.reach(200)
    assert await asyncio.to_thread(server.stop) == 0
    await reading
    return stream


@pytest.mark.parametrize("target", ["/etc/passwd", "itself"])
async def test_symlink_in_the_store_is_not_followed(target: str, tmp_path: Path) -> None:
    """The state in it is not read; the log leads to the same tokens without it."""
    history, snapshots = History(), tmp_path / "store" / "snapshots"
    with tiny_server(tmp_path) as server:
        stream = await interrupted(server, history)
        files = list(snapshots.glob("*/*.safetensors"))
        assert files, "nothing was saved"
        for file in files:
            moved = tmp_path / file.name
            file.rename(moved)
            file.symlink_to(moved if target == "itself" else target)
        server.start()
        assert await stream.run(server.stream_url, num_tokens=100) == "finished"
        log = server.log()
    body = {**stream.body, "max_tokens": len(stream.tokens)}
    assert stream.tokens == Soloist(tmp_path / "model").tokens(**body)
    assert f"snapshot {files[-1].relative_to(snapshots)}: the state file" in log
