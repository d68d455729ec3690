"""Our server over real sockets, compared with others: the same completions as server-sent events.

Next to `everstream serve` runs llama.cpp's `llama-server`, with a Llama or an RWKV-7; all have
random weights, the same vocabulary and as many parameters. Each of the others runs twice, with as
many threads as ours and with one (2t, 1t), since more are not always faster next to a load
generator. They take turns for several rounds. A token is one that was asked for; time between
tokens is that between two arrivals of text at the client. CPU time is the server's whole process
by token, the model's arithmetic included.
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
from benchmarks.process import ROOT, exit_on_sigterm
from benchmarks.report import Figures, Result, command_line
from benchmarks.serve.processes import (
    OURS,
    PEERS,
    Target,
    best_llama_type,
    start_ours,
    start_peer,
)
from benchmarks.studies.pages.speed import serve_table

WARM_UP_TOKENS = 16
#: Above this part of a core the load generator may be what is measured.
MAX_LOAD_CPU = 0.8

#: Figures whose medians are reported.
COLUMNS = (
    *("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"),
    *("cpu_us_per_token", "load_cpu"),
)


def arguments(command: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=[], help="other servers to measure"
    )
    parser.add_argument("--dtype", help="type: auto, float32, bfloat16, int8 or int4")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of a server")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--requests", type=int, default=8, help="requests of each stream")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="short run")
    parser.add_argument("--size", choices=SIZES, default="S1")
    parser.add_argument("--attention", default="gated")
    parser.add_argument("--llama-server", default="llama-server", help="path of the binary")
    parser.add_argument(
        "--llama-type", default=best_llama_type(), help="type: BF16, F16, F32 or Q8_0"
    )
    parser.add_argument("--models", type=Path, help="folder to keep the models in between runs")
    options = parser.parse_args(command)
    if options.quick:
        options.streams, options.requests, options.rounds = [1, 8], 1, 1
        options.max_tokens = 16
    return options


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
                found = load(target, streams, options.requests, options.max_tokens, seed)
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


def warn_of_load(rows: Mapping[str, Mapping[int, Figures]]) -> None:
    """Says so where the load generator may be what was measured."""
    busiest = max(of_one[streams]["load_cpu"] for of_one in rows.values() for streams in of_one)
    if busiest > MAX_LOAD_CPU:
        print(f"the load generator used {busiest:.0%} of a core and may be what was measured")


def main(command: Sequence[str] | None = None) -> None:
    """Starts all servers, measures, prints, and ends with the line of JSON."""
    exit_on_sigterm()
    options = arguments(command)
    result = Result("serve", options.output)
    with ExitStack() as stack:
        folder = options.models or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets = [start_ours(options, folder, stack)]
        for name in options.peers:
            counts = sorted({1, options.threads})
            targets += [start_peer(name, n, options, folder, stack) for n in counts]
        runs = measure(targets, options)
    rows = {
        name: {streams: medians(found) for streams, found in of_one.items()}
        for name, of_one in runs.items()
    }
    settings = ("size", "attention", "dtype", "llama_type", "threads", "max_tokens", "requests")
    figures: Figures = {name: getattr(options, name) for name in settings}
    figures |= {"rounds": options.rounds, "servers": rows, "ratios": ratios(rows)}
    print(serve_table(figures))
    warn_of_load(rows)
    result.finish(figures)


if __name__ == "__main__":
    main()
