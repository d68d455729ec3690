from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from websockets.sync.server import ServerConnection

from clients.load import Load, Measured, run, summarize
from tests.clients.stub import Message, answering, finished, started


def load(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clients.load", "--url", url, *flags]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("per_socket", [1, 3, 8])
def test_runs_against_a_server_and_ends_with_json(server_url: str, per_socket: int) -> None:
    sizes = ["--streams", "4", "--requests", "2", "--max-tokens", "9"]
    done = load(server_url, *sizes, "--per-socket", str(per_socket))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["streams"], figures["requests"], figures["errors"]) == (4, 8, 0)
    assert figures["tokens"] == 4 * 2 * 9
    assert 0 < figures["itl_p50_ms"] <= figures["itl_p99_ms"]
    assert figures["tokens_per_s"] == pytest.approx(
        figures["tokens"] / figures["seconds"], rel=0.01
    )


def test_prompts_come_from_a_file_or_are_drawn(tmp_path: Path) -> None:
    def end(connection: ServerConnection, message: Message) -> None:
        connection.send(finished(message, "length"))

    file = tmp_path / "prompts"
    file.write_text("one\n\ntwo\n")
    with answering(end) as stub:
        one_stream = ["--streams", "1", "--requests", "3"]
        assert load(stub.url, *one_stream, "--prompt-file", str(file)).returncode == 0
        prompts = [stub.next_message("generate")["prompt"] for _ in range(3)]
        assert prompts == ["one", "two", "one"]
        assert load(stub.url, *one_stream, "--prompt-tokens", "70").returncode == 0
        assert len(stub.next_message("generate")["prompt"]) == 70


def test_refused_requests_are_counted(server_url: str) -> None:
    done = load(server_url, "--temperature", "5", "--streams", "2")
    assert done.returncode == 1
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["errors"], figures["ttft_p50_ms"]) == (8, None)
    assert "invalid_value" in done.stdout


def test_failed_and_cut_off_requests_are_counted() -> None:
    def fail_then_break_off(connection: ServerConnection, message: Message) -> None:
        connection.send(started(message))
        if message["seed"] % 3 == 0:
            connection.send(finished(message, "error", error="no"))
        else:
            connection.close(1012)

    with answering(fail_then_break_off) as stub:
        _, measured = asyncio.run(run(Load(stub.url, num_streams=2, num_requests=3)))
    assert sorted(measured.errors) == ["connection_lost"] * 4 + ["error"] * 2


def test_unreachable_server_is_a_message() -> None:
    done = load("http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("load: cannot connect to http://127.0.0.1:1")
    assert "Traceback" not in done.stderr


def test_percentiles_are_nearest_rank() -> None:
    times = [i / 1000 for i in range(1, 101)]
    measured = Measured(times[::-1], times[:3], num_tokens=200)
    summary = summarize(Load("http://x"), measured, seconds=4.0)
    assert (summary.ttft_p50_ms, summary.ttft_p90_ms, summary.ttft_p99_ms) == (50.0, 90.0, 99.0)
    assert (summary.itl_p50_ms, summary.itl_p99_ms) == (2.0, 3.0)
    assert summary.tokens_per_s == 50.0
