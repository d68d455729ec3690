"""Our server beside others over real sockets: the same load of completions as server-sent events.

Beside `everstream serve` run llama.cpp's `llama-server`, with a Llama or an RWKV-7, and a plain
FastAPI server around transformers' `generate`; all have random weights, the same vocabulary and as
many parameters. Each of the others runs twice, with as many threads as ours and with one (2t, 1t),
since more are not always faster beside a load generator. They take turns for several rounds. A
token is one that was asked for; time between tokens is that between two arrivals of text at the
client. CPU time is the server's whole process by token, the model's arithmetic included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.decode.shapes import SIZES
from benchmarks.machine import cpu_seconds, resident_bytes
from benchmarks.process import ROOT
from benchmarks.report import Figures, print_result, show, table
from benchmarks.serve.processes import (
    OURS,
    PEERS,
    PLAIN,
    Target,
    best_llama_type,
    start_ours,
    start_peer,
)

WARM_UP_TOKENS = 16
#: Of the table, in characters.
WIDTH = 150
#: Above this part of a core the load generator may be what is measured.
MAX_LOAD_CPU = 0.8

COLUMNS = {
    "tokens_per_s": "tokens/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "p99",
    "itl_p50_ms": "arrivals p50 ms",
    "itl_p99_ms": "p99",
    "cpu_us_per_token": "server CPU us/token",
    "load_cpu": "load's CPU",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the comparison."""
    group = parser.add_argument_group("beside other servers, with random weights")
    group.add_argument("--beside", nargs="*", choices=PEERS, help="the others; none is ours alone")
    group.add_argument("--size", choices=SIZES, default="S1")
    group.add_argument("--attention", default="gated")
    group.add_argument("--llama-server", default="llama-server", help="path of its binary")
    group.add_argument("--llama-type", default=best_llama_type(), help="BF16, F16, F32 or Q8_0")
    group.add_argument("--plain-max-tokens", type=int, default=32, help="of the slow plain server")
    group.add_argument("--models", type=Path, help="folder that keeps the models between runs")
    group.add_argument("--output", type=Path, help="file for the line of JSON")


def load(target: Target, streams: int, requests: int, max_tokens: int, seed: int) -> Figures:
    """One run of `benchmarks.serve.load`, and what it cost the server."""
    flags = {"url": target.url, "dialect": target.dialect, "streams": streams}
    flags |= {"requests": requests, "max-tokens": max_tokens, "seed": seed}
    command = [sys.executable, "-m", "benchmarks.serve.load"]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    before = cpu_seconds(target.pid)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the load of {target.name} failed:\n{done.stderr}")
    figures: Figures = json.loads(done.stdout)
    used = cpu_seconds(target.pid) - before
    figures["cpu_us_per_token"] = round(used / figures["tokens"] * 1e6, 1)
    figures["load_cpu"] = round(figures["load_cpu_s"] / figures["seconds"], 3)
    figures["server_rss_mib"] = round(resident_bytes(target.pid) / 2**20, 1)
    return figures


def measure(
    targets: Sequence[Target], options: argparse.Namespace
) -> dict[str, dict[int, list[Figures]]]:
    """The runs of each server for each number of streams."""
    runs: dict[str, dict[int, list[Figures]]] = {target.name: {} for target in targets}
    for target in targets:
        load(target, max(options.streams), 1, WARM_UP_TOKENS, seed=0)
    for seed in range(1, options.rounds + 1):
        for streams in options.streams:
            for target in targets if seed % 2 else targets[::-1]:
                plain = target.name.startswith(PLAIN)
                requests = 1 if plain else options.requests
                max_tokens = options.plain_max_tokens if plain else options.max_tokens
                found = load(target, streams, requests, max_tokens, seed)
                runs[target.name].setdefault(streams, []).append(found)
    return runs


def medians(runs: Sequence[Figures]) -> Figures:
    """The median of every figure in `COLUMNS`, and the raw runs."""
    result: Figures = {}
    for name in COLUMNS:
        values = [figures[name] for figures in runs if figures[name] is not None]
        result[name] = round(statistics.median(values), 3) if values else None
    return {**result, "rounds": list(runs)}


def ratios(rows: Mapping[str, Mapping[int, Figures]]) -> dict[str, dict[int, float]]:
    """Our tokens/s by those of each peer, for each number of streams."""
    ours = rows[OURS]
    return {
        name: {
            streams: round(ours[streams]["tokens_per_s"] / figures["tokens_per_s"], 3)
            for streams, figures in of_peer.items()
        }
        for name, of_peer in rows.items()
        if name != OURS
    }


def print_rows(rows: Mapping[str, Mapping[int, Figures]], options: argparse.Namespace) -> None:
    """A row for each number of streams and each server."""
    title = f"{options.size}, {options.max_tokens} tokens a request, {options.rounds} rounds"
    result = table(title, ("server", "streams", *COLUMNS.values(), "ours by it"))
    against = ratios(rows)
    for streams in options.streams:
        for name, of_one in rows.items():
            figures = of_one[streams]
            cells = ["-" if figures[c] is None else f"{figures[c]:,.2f}" for c in COLUMNS]
            ratio = f"{against[name][streams]:.2f}" if name in against else ""
            result.add_row(name, str(streams), *cells, ratio)
        result.add_section()
    show(result, width=WIDTH)
    busiest = max(of_one[streams]["load_cpu"] for of_one in rows.values() for streams in of_one)
    if busiest > MAX_LOAD_CPU:
        print(f"the load generator used {busiest:.0%} of a core and may be what was measured")


def compare(options: argparse.Namespace, on: Figures) -> None:
    """Starts all servers, measures, prints, and ends with the line of JSON."""
    options.threads = options.threads or os.cpu_count()
    with ExitStack() as stack:
        folder = options.models or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets = [start_ours(options, folder, stack)]
        for name in options.beside:
            counts = sorted({1, options.threads})
            targets += [start_peer(name, n, options, folder, stack) for n in counts]
        runs = measure(targets, options)
    rows = {
        name: {streams: medians(found) for streams, found in of_one.items()}
        for name, of_one in runs.items()
    }
    print_rows(rows, options)
    settings = ("size", "attention", "dtype", "llama_type", "threads", "max_tokens", "requests")
    figures: Figures = {name: getattr(options, name) for name in settings}
    figures |= {"rounds": options.rounds, "servers": rows, "ratios": ratios(rows)}
    print_result("serve", on, figures, options.output)
