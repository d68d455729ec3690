"""A real server under 1, 8 and 64 WebSocket streams: latency, throughput, CPU and memory.

Server and load generator (`clients.bench`) are processes of their own. The loads
take turns for several rounds and each figure is the median of its rounds. With ``--beside`` our
server and others answer the same load of completions over HTTP instead (`peers`):

    python -m benchmarks.serve --beside llama rwkv7 transformers --llama-server PATH
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from benchmarks.machine import cpu_seconds, machine, resident_bytes
from benchmarks.process import ROOT, ServerProcess, exit_on_sigterm, wait_ready
from benchmarks.report import Figures, print_result, show, table
from benchmarks.serve import peers

WARM_UP_MAX_TOKENS = 32

#: Figures of one run, as `clients.bench` names them and as the table does.
COLUMNS = {
    "tokens_per_s": "tokens/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "p99",
    "itl_p50_ms": "inter-token p50 ms",
    "itl_p99_ms": "p99",
    "server_cpu_s_per_1000_tokens": "server CPU s/1,000 tokens",
    "server_rss_mib": "server MiB",
}


def load(url: str, streams: int, requests: int, max_tokens: int, seed: int) -> Figures:
    """Runs the load generator to its end; raises where a request failed."""
    flags = {"url": url, "concurrency": streams, "requests": requests, "max-tokens": max_tokens}
    command = [sys.executable, "-m", "clients.bench", "--warm-up", "0", "--seed", str(seed)]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the load generator failed:\n{done.stdout}")
    (figures,) = json.loads(done.stdout.splitlines()[-1])["levels"]
    result: Figures = figures
    return result


def run(url: str, pid: int | None, streams: int, options: argparse.Namespace, seed: int) -> Figures:
    """The figures of one load; those of the server's process are None without its ``pid``."""
    before = cpu_seconds(pid) if pid else 0.0
    figures = load(url, streams, options.requests, options.max_tokens, seed)
    figures["server_cpu_s_per_1000_tokens"] = figures["server_rss_mib"] = None
    if pid:
        used = cpu_seconds(pid) - before
        figures["server_cpu_s_per_1000_tokens"] = 1000 * used / figures["tokens"]
        figures["server_rss_mib"] = resident_bytes(pid) / 2**20
    return figures


def medians(runs: list[Figures]) -> Figures:
    """The median of every figure in `COLUMNS`."""
    result: Figures = {}
    for name in COLUMNS:
        values = [figures[name] for figures in runs if figures[name] is not None]
        result[name] = round(statistics.median(values), 3) if values else None
    return result


def print_table(title: str, rows: Mapping[int, Figures]) -> None:
    """A row for each number of streams."""
    result = table(title, ("streams", *COLUMNS.values()))
    for streams, figures in rows.items():
        cells = ("-" if value is None else f"{value:,.2f}" for value in figures.values())
        result.add_row(str(streams), *cells)
    show(result)


def server_flags(options: argparse.Namespace) -> list[str]:
    """The flags of ``everstream serve``."""
    flags = {"--threads": options.threads, "--model": options.model, "--dtype": options.dtype}
    return [part for name, value in flags.items() if value for part in (name, str(value))]


def arguments(command: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="checkpoint folder; the bundled one if left out")
    parser.add_argument("--dtype", help="auto, float32, bfloat16 or int8")
    parser.add_argument("--threads", type=int, help="of the server")
    parser.add_argument("--url", help="a server that runs already, instead of one of our own")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--requests", type=int, default=8, help="of each stream")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a short form")
    peers.add_arguments(parser)
    options = parser.parse_args(command)
    if options.quick:
        options.streams, options.requests, options.rounds = [1, 8], 1, 1
        options.max_tokens = options.plain_max_tokens = 16
    return options


def measure(url: str, pid: int | None, options: argparse.Namespace) -> dict[int, Figures]:
    """The medians for each number of streams."""
    load(url, max(options.streams), 1, WARM_UP_MAX_TOKENS, seed=0)
    runs: dict[int, list[Figures]] = {streams: [] for streams in options.streams}
    for seed in range(1, options.rounds + 1):
        for streams, results in runs.items():
            results.append(run(url, pid, streams, options, seed))
    return {streams: medians(results) for streams, results in runs.items()}


def main(command: Sequence[str] | None = None) -> None:
    """Measures, prints, and ends with the line of JSON."""
    exit_on_sigterm()
    options = arguments(command)
    on = machine()
    if options.beside is not None:
        peers.compare(options, on)
        return
    with ExitStack() as stack:
        pid = None
        url = options.url
        if url:
            wait_ready(url)
        else:
            server = stack.enter_context(ServerProcess(*server_flags(options)))
            url, pid = server.url, server.pid
        rows = measure(url, pid, options)
    print_table(f"{options.max_tokens} tokens a request, median of {options.rounds} rounds", rows)
    print_result(
        "serve",
        on,
        {
            "threads": options.threads,
            "max_tokens": options.max_tokens,
            "requests_per_stream": options.requests,
            "rounds": options.rounds,
            "streams": {str(streams): figures for streams, figures in rows.items()},
        },
    )


if __name__ == "__main__":
    main()
