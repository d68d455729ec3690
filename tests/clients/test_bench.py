from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner
from websockets.sync.server import ServerConnection

from clients.bench.figures import Limits, errors_of, percentile_ms, summarize
from clients.bench.load import Load, Timed, run
from server.cli.main import app
from tests.clients.stub import Message, answering, finished, started


def bench(url: str, *flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clients.bench", "--url", url, *map(str, flags)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def timed(ttft_ms: float, gaps_ms: Sequence[float], error: str | None = None) -> Timed:
    total_s = (ttft_ms + sum(gaps_ms)) / 1000
    return Timed(0.0, total_s, ttft_ms / 1000, [gap / 1000 for gap in gaps_ms], error)


@pytest.mark.parametrize("per_socket", [1, 3, 8])
def test_runs_against_a_server_and_ends_with_json(server_url: str, per_socket: int) -> None:
    sizes = ["--concurrency", "1,4", "--requests", 2, "--max-tokens", 9]
    done = bench(server_url, *sizes, "--per-socket", per_socket)
    assert done.returncode == 0, done.stderr
    levels = json.loads(done.stdout.splitlines()[-1])["levels"]
    assert [level["streams"] for level in levels] == [1, 4]
    for level in levels:
        assert (level["requests"], level["errors"]) == (level["streams"] * 2, 0)
        assert level["tokens"] == level["requests"] * 9
        assert 0 < level["itl_p50_ms"] <= level["itl_p99_ms"]
        assert level["ttft_p50_ms"] < level["latency_p50_ms"]
        assert level["goodput_per_s"] == level["requests_per_s"]
        per_s = level["tokens"] / level["seconds"]
        # Rounded to one decimal, which is much where a model is slow.
        assert level["tokens_per_s"] == pytest.approx(per_s, rel=0.01, abs=0.05)


def test_requests_arrive_at_a_rate(server_url: str) -> None:
    done = bench(server_url, "--rate", "40", "--duration", "0.5", "--max-tokens", 3)
    assert done.returncode == 0, done.stderr
    (level,) = json.loads(done.stdout.splitlines()[-1])["levels"]
    assert (level["rate"], level["streams"], level["requests"]) == (40, None, 20)
    assert level["tokens"] == 20 * 3


def test_arrivals_are_a_poisson_process_that_the_seed_decides() -> None:
    load = Load("http://x", rate=50.0, num_requests=20_000, seed=3)
    times = list(load.arrivals())
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.06)
    assert times == list(load.arrivals())


def test_command_writes_json_and_a_picture(server_url: str, tmp_path: Path) -> None:
    output, plot = tmp_path / "figures.json", tmp_path / "sweep.png"
    flags = ["--concurrency", "1,2", "--requests", "1", "--max-tokens", "4", "--itl-limit", "1000"]
    files = ["--output", str(output), "--plot", str(plot)]
    result = CliRunner().invoke(app, ["bench", "--url", server_url, *flags, *files])
    assert result.exit_code == 0, result.output
    assert json.loads(output.read_text("utf-8")) == json.loads(result.output.splitlines()[-1])
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags", [["--concurrency", "1,x"], ["--rate", "0"], ["--rate", ""]])
def test_levels_that_are_none_are_a_message(flags: list[str]) -> None:
    done = bench("http://127.0.0.1:1", *flags)
    assert done.returncode == 2
    assert done.stderr == f"everstream: {flags[0]}: must be comma-separated numbers above 0\n"


def test_prompts_come_from_a_file_or_are_drawn(tmp_path: Path) -> None:
    def end(connection: ServerConnection, message: Message) -> None:
        connection.send(finished(message, "length"))

    file = tmp_path / "prompts"
    file.write_text("one\n\ntwo\n")
    with answering(end) as stub:
        flags = ["--concurrency", 1, "--requests", 3, "--warm-up", 0]
        assert bench(stub.url, *flags, "--prompt-file", file).returncode == 0
        prompts = [stub.next_message("generate")["prompt"] for _ in range(3)]
        assert prompts == ["one", "two", "one"]
        assert bench(stub.url, *flags, "--prompt-tokens", 70).returncode == 0
        assert len(stub.next_message("generate")["prompt"]) == 70


def test_refused_requests_are_counted(server_url: str) -> None:
    done = bench(server_url, "--temperature", 5, "--concurrency", 2)
    assert done.returncode == 1
    (level,) = json.loads(done.stdout.splitlines()[-1])["levels"]
    assert (level["errors"], level["ttft_p50_ms"], level["goodput_per_s"]) == (8, None, 0)
    assert "8 requests ended by invalid_value" in done.stdout


def test_failed_and_cut_off_requests_are_counted() -> None:
    def fail_then_break_off(connection: ServerConnection, message: Message) -> None:
        connection.send(started(message))
        if message["seed"] % 3 == 0:
            connection.send(finished(message, "error", error="no"))
        else:
            connection.close(1012)

    with answering(fail_then_break_off) as stub:
        requests, _ = asyncio.run(run(Load(stub.url, num_streams=2, num_requests=3)))
    assert errors_of(requests) == {"connection_lost": 4, "error": 2}


def test_unreachable_server_is_a_message() -> None:
    done = bench("http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("everstream: cannot connect to http://127.0.0.1:1")
    assert "Traceback" not in done.stderr


def test_percentiles_are_nearest_rank() -> None:
    times = [i / 1000 for i in range(100, 0, -1)]
    assert [percentile_ms(times, percent) for percent in (50, 90, 99)] == [50.0, 90.0, 99.0]
    assert [percentile_ms([0.001, 0.002, 0.003], percent) for percent in (50, 99)] == [2.0, 3.0]
    assert percentile_ms([], 50) is None


def test_goodput_counts_what_kept_every_limit() -> None:
    requests = [
        timed(10, [5, 5]),
        timed(30, [5, 5]),  # late to its first token
        timed(10, [5, 45]),  # slow on average
        timed(10, [5, 15]),
        timed(10, [5], error="cancelled"),
    ]
    load = Load("http://x", num_streams=5, num_requests=1)
    summary = summarize(load, requests, 2.0, Limits(ttft_ms=20, itl_ms=10))
    assert summary.goodput_per_s == 1.0
    assert summary.requests_per_s == 2.0
    assert summary.errors == 1
    assert summarize(load, requests, 2.0, Limits()).goodput_per_s == 2.0


def test_numbers_are_whole_on_a_narrow_terminal_and_levels_are_announced(
    server_url: str,
) -> None:
    from typer.testing import CliRunner

    from server.cli.main import app

    words = ["bench", "--url", server_url, "--concurrency", "1,2", "--max-tokens", "4"]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "30", "TERMINAL_WIDTH": "30"})
    assert done.exit_code == 0, done.output
    *table, line = done.stdout.splitlines()
    levels = json.loads(line)["levels"]
    for level in levels:
        row = next(row.split() for row in table if row.split()[:1] == [str(level["streams"])])
        assert len(row) == 8
        assert row[1] == f"{level['tokens_per_s']:,.0f}"
    assert "level 1 of 2: 1 stream of 4 requests ..." in done.stderr
    assert "level 2 of 2: 2 streams of 4 requests ..." in done.stderr
