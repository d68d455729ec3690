from __future__ import annotations

import json
import subprocess
import sys

import pytest

from clients.load import Load, Measured, summarize


def test_runs_against_a_server_and_ends_with_json(server_url: str) -> None:
    command = [sys.executable, "-m", "clients.load", "--url", server_url]
    sizes = ["--streams", "4", "--requests", "2", "--max-tokens", "9"]
    output = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True).stdout
    figures = json.loads(output.splitlines()[-1])
    assert (figures["streams"], figures["requests"], figures["errors"]) == (4, 8, 0)
    assert figures["tokens"] == 4 * 2 * 9
    assert 0 < figures["itl_p50_ms"] <= figures["itl_p99_ms"]
    assert figures["tokens_per_s"] == pytest.approx(
        figures["tokens"] / figures["seconds"], rel=0.01
    )


def test_refused_requests_are_counted(server_url: str) -> None:
    command = [sys.executable, "-m", "clients.load", "--url", server_url, "--temperature", "5"]
    done = subprocess.run([*command, "--streams", "2"], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["errors"] == 8


def test_percentiles_are_nearest_rank() -> None:
    times = [i / 1000 for i in range(1, 101)]
    measured = Measured(times[::-1], times, num_tokens=200)
    summary = summarize(Load("http://x"), measured, seconds=4.0)
    assert (summary.ttft_p50_ms, summary.ttft_p90_ms, summary.ttft_p99_ms) == (50.0, 90.0, 99.0)
    assert summary.tokens_per_s == 50.0
