"""RWKV-7 files of the published sizes in a real server: loading, memory, many sessions, a long one.

    python -m benchmarks.checkpoints.sizes --models FOLDER

For each file: seconds until the server takes work, the largest and the steady resident memory.
For one file of each size: streams side by side, a session that reads 100,000 tokens, and a restart
with sleeping sessions. Random weights, as in `shapes`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.checkpoints.shapes import CONFIGS, file_of
from benchmarks.machine import peak_bytes, resident_bytes
from benchmarks.process import ServerProcess, exit_on_sigterm
from benchmarks.report import Figures, Result, command_line
from benchmarks.serve.__main__ import load
from benchmarks.serve.processes import OURS, Target
from benchmarks.sessions.server import first_token_s
from benchmarks.sessions.sleeping import make
from benchmarks.studies.pages.models import SIZES
from clients.python import Client, Session
from model.state import StateLayout
from model.weights import num_parameters

#: File and the precision that it is served in.
LOADED = (("pth", "bfloat16"), ("hf", "bfloat16"), ("bfloat16", "bfloat16"), ("int8", "int8"))
#: What the rest is measured on.
SERVED = ("int8", "int8")
STREAMS, TOKENS, SLOTS = 64, 32, 64
PIECE = 4096
REQUESTS = 20


def loading(file: Path, dtype: str) -> Figures:
    """Until the server is ready; memory at its largest, and after a text was written."""
    start = time.perf_counter()
    with ServerProcess(*flags(file, dtype)) as server, Client(server.url, timeout_s=600) as client:
        ready = time.perf_counter() - start
        largest = peak_bytes(server.pid)
        client.generate("Once", max_tokens=4).text()
        steady = resident_bytes(server.pid)
    return {
        "file": file.name,
        "file_bytes": sum(part.stat().st_size for part in [file, *file.rglob("*")]),
        "dtype": dtype,
        "ready_s": round(ready, 2),
        "peak_bytes": largest,
        "steady_bytes": steady,
        "peak_by_steady": round(largest / steady, 3),
    }


def streams(server: ServerProcess) -> Figures:
    """Tokens/s of `STREAMS` completions side by side."""
    found = load(Target(OURS, server.url, server.pid, "openai"), STREAMS, 1, TOKENS, seed=0)
    return {"streams": STREAMS, "tokens_per_s": round(found["tokens"] / found["seconds"], 1)}


def long_session(client: Client, pid: int, num_tokens: int) -> Figures:
    """Reads random ids; memory and a token's time before and after."""
    ids = np.random.default_rng(0).integers(300, 60_000, num_tokens).tolist()
    session = client.create_session()
    session.append(ids[:PIECE])
    before, first = resident_bytes(pid), token_ms(session)
    start = time.perf_counter()
    for begin in range(PIECE, num_tokens, PIECE):
        session.append(ids[begin : begin + PIECE])
    seconds = time.perf_counter() - start
    return {
        "tokens": num_tokens,
        "read_tokens_per_s": round((num_tokens - PIECE) / seconds, 1),
        "token_ms_at_start": first,
        "token_ms_at_end": token_ms(session),
        "grown_bytes": resident_bytes(pid) - before,
    }


def token_ms(session: Session) -> float:
    """Milliseconds of a request for one token, the median of some."""
    return round(float(np.median([first_token_s(session) for _ in range(REQUESTS)])) * 1e3, 2)


def sleeping(file: Path, dtype: str, folder: Path, num_sessions: int) -> Figures:
    """A restart with sessions on the disk, each with a state of its own."""
    store = ["--store", str(folder), "--durability", "relaxed", "--sleep-memory", "0"]
    with ServerProcess(*flags(file, dtype), *store) as server:
        ids = asyncio.run(make(server.url, num_sessions))
        server.stop()
    stored = sum(part.stat().st_size for part in folder.rglob("*") if part.is_file())
    start = time.perf_counter()
    with ServerProcess(*flags(file, dtype), *store) as server:
        ready = time.perf_counter() - start
        with Client(server.url, timeout_s=600) as client:
            memory = resident_bytes(server.pid)
            wakes = [first_token_s(client.session(id)) for id in ids[:: num_sessions // 20]]
    return {
        "sessions": num_sessions,
        "disk_bytes": stored,
        "ready_s": round(ready, 2),
        "memory_bytes": memory,
        "wake_ms": round(float(np.median(wakes)) * 1e3, 1),
    }


def flags(file: Path, dtype: str) -> list[str]:
    """Of a server with all cores."""
    return ["--model", str(file), "--dtype", dtype, "--max-sessions", str(SLOTS)]


def measure(size: str, models: Path, options: argparse.Namespace) -> Figures:
    """All figures of one size."""
    config = CONFIGS[size]
    figures: Figures = {
        "size": size,
        "parameters": num_parameters(config),
        "state_bytes": StateLayout.of(config).num_bytes,
        "loading": [loading(file_of(models, size, kind), dtype) for kind, dtype in LOADED],
    }
    kind, dtype = SERVED
    file = file_of(models, size, kind)
    with ServerProcess(*flags(file, dtype)) as server, Client(server.url, timeout_s=600) as client:
        figures["streams"] = streams(server)
        if size in options.long:
            figures["long"] = long_session(client, server.pid, options.long_tokens)
    if size in options.sleeping:
        with tempfile.TemporaryDirectory(dir=models) as folder:
            found = sleeping(file, dtype, Path(folder) / "store", options.sessions)
            figures["sleeping"] = found
    print(json.dumps(figures), file=sys.stderr, flush=True)
    return figures


def main() -> None:
    """Measures, writes the result after each size."""
    exit_on_sigterm()
    parser = command_line(__doc__, SIZES)
    parser.add_argument("--size", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--long", nargs="*", choices=CONFIGS, default=["0.1B"])
    parser.add_argument("--long-tokens", type=int, default=100_000)
    parser.add_argument("--sleeping", nargs="*", choices=CONFIGS, default=["0.1B"])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--models", type=Path, help="folder to keep the files in between runs")
    options = parser.parse_args()
    result = Result("checkpoints.sizes", options.output)
    figures: Figures = {"threads": os.cpu_count(), "sizes": []}
    with tempfile.TemporaryDirectory() as folder:
        for size in options.size:
            figures["sizes"].append(measure(size, options.models or Path(folder), options))
            result.save(figures)
    result.finish(figures)


if __name__ == "__main__":
    main()
