"""Tokens/s over sockets: `everstream serve` and `llama-server` with the same GGUF file.

    python -m benchmarks.checkpoints.sockets --llama-server PATH --models FOLDER

Both get the same load of completions as server-sent events (`benchmarks.serve.load`), in turns.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.checkpoints.shapes import CONFIGS, file_of
from benchmarks.process import PeerProcess, ServerProcess, exit_on_sigterm
from benchmarks.report import Figures, Result, command_line
from benchmarks.serve.__main__ import measure, medians, ratios
from benchmarks.serve.processes import OURS, Target, llama_command
from benchmarks.studies.pages.models import SOCKETS


def compare(file: Path, dtype: str, options: argparse.Namespace) -> Figures:
    """Both servers on one file; llama.cpp's with one thread and with all."""
    flags = ["--model", str(file), "--dtype", dtype, "--threads", str(options.threads)]
    slots = max(options.streams)
    with ExitStack() as stack:
        ours = stack.enter_context(ServerProcess(*flags, "--max-sessions", str(slots)))
        targets = [Target(OURS, ours.url, ours.pid, "openai")]
        for threads in sorted({1, options.threads}):
            command = llama_command(options.llama_server, file, slots, threads)
            peer = stack.enter_context(PeerProcess(command))
            targets.append(Target(f"llama-server, {threads}t", peer.url, peer.pid, "llama"))
        rows = {
            name: {streams: medians(runs) for streams, runs in of_one.items()}
            for name, of_one in measure(targets, options).items()
        }
    return {"file": file.name, "dtype": dtype, "servers": rows, "ratios": ratios(rows)}


def main() -> None:
    """Measures, and writes the result after each file."""
    exit_on_sigterm()
    parser = command_line(__doc__, SOCKETS)
    parser.add_argument("--llama-server", default="llama-server", help="path of the binary")
    parser.add_argument("--size", nargs="+", choices=CONFIGS, default=["0.1B"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=1, help="requests of each stream")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--models", type=Path, help="folder to keep the files in between runs")
    options = parser.parse_args()
    result = Result("checkpoints.sockets", options.output)
    figures: Figures = {"rounds": options.rounds, "max_tokens": options.max_tokens, "files": []}
    with tempfile.TemporaryDirectory() as folder:
        for size in options.size:
            for dtype in options.dtype:
                file = file_of(options.models or Path(folder), size, dtype)
                figures["files"].append({"size": size, **compare(file, dtype, options)})
                result.save(figures)
    result.finish(figures)


if __name__ == "__main__":
    main()
