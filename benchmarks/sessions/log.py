"""What the log costs: streams of kept sessions compared with the same ones that are not kept."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks.machine import cpu_seconds
from benchmarks.process import ROOT, ServerProcess
from benchmarks.report import Figures
from benchmarks.sessions.report import Row, Target

MIN_FULL_RATIO = 0.9
WARM_UP_TOKENS = 16


def measure(folder: Path, streams: int, max_tokens: int, rounds: int) -> list[Row]:
    """Throughput of each way by that of unkept sessions in the same round, in turns."""
    with ExitStack() as stack:

        def start(*flags: str) -> ServerProcess:
            return stack.enter_context(ServerProcess("--threads", "1", *flags))

        memory = start("--store", "memory")
        relaxed = start("--store", str(folder / "relaxed"), "--durability", "relaxed")
        full = start("--store", str(folder / "full"), "--durability", "full")
        ways = {
            "unkept": (full, False),
            "kept, store in memory": (memory, True),
            "kept, relaxed durability": (relaxed, True),
            "kept, full durability": (full, True),
        }
        runs: dict[str, list[Figures]] = {name: [] for name in ways}
        for server, _ in ways.values():
            load(server, streams, WARM_UP_TOKENS, 0, keep=False)
        for seed in range(1, rounds + 1):
            for name, (server, keep) in ways.items():
                runs[name].append(load(server, streams, max_tokens, seed, keep=keep))
    return rows_of(runs)


def load(server: ServerProcess, streams: int, max_tokens: int, seed: int, *, keep: bool) -> Figures:
    """The figures of one load; raises where a request failed."""
    command = [sys.executable, "-m", "clients.bench", "--url", server.url, "--requests", "1"]
    command += ["--concurrency", str(streams), "--max-tokens", str(max_tokens), "--warm-up", "0"]
    command += ["--seed", str(seed)]
    before = cpu_seconds(server.pid)
    done = subprocess.run(
        [*command, *(["--keep"] if keep else [])],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"the load generator failed:\n{done.stdout}{server.log()}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])["levels"][0]
    figures["cpu_us_per_token"] = 1e6 * (cpu_seconds(server.pid) - before) / figures["tokens"]
    return figures


def rows_of(runs: dict[str, list[Figures]]) -> list[Row]:
    """Tokens/s of each way, its ratio to the first one, and what it adds to a token."""
    base, rows = next(iter(runs)), []
    for name, own in runs.items():
        rows.append(Row(name, _median(own, "tokens_per_s"), "tokens/s"))
        rows.append(Row(f"{name}, p99 between tokens", _median(own, "itl_p99_ms"), "ms"))
        rows.append(Row(f"{name}, CPU", _median(own, "cpu_us_per_token"), "us/token"))
        if name != base:
            pairs = zip(own, runs[base], strict=True)
            ratios = [one["tokens_per_s"] / other["tokens_per_s"] for one, other in pairs]
            target = (
                Target(MIN_FULL_RATIO, "at least") if name.endswith("full durability") else None
            )
            ratio = round(statistics.median(ratios), 3)
            rows.append(Row(f"{name} / {base}", ratio, "x", target=target))
    return rows


def _median(runs: list[Figures], name: str) -> float:
    return round(statistics.median(figures[name] for figures in runs), 3)
