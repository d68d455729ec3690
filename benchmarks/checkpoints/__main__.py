"""Tokens/s on the same GGUF file: Everstream, llama.cpp and, of RWKV-7, the `rwkv` package.

    python -m benchmarks.checkpoints --models FOLDER
    python -m benchmarks.checkpoints --family qwen35 --context 0 4096 --models FOLDER
    python -m benchmarks.checkpoints --family qwen35 --context 0 4096 --threads 2 --keep
    python -m benchmarks.checkpoints --family smollm2 --context 0 4096 32768 --dtype int4 int8

The third one measures some rows again and keeps the others, with the commands that gave them.

At each point they take turns for several rounds, each in a process of its own; a figure is the
median of its rounds. A ratio is Everstream's by the other's. Before each turn the bandwidth of
reading as many bytes as a step moves is measured: the share of the roofline follows from it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, fields
from itertools import product
from pathlib import Path

from benchmarks.checkpoints import chat, folders, hybrids, shapes
from benchmarks.decode.peers import Point
from benchmarks.decode.report import figures_of, measure
from benchmarks.decode.roofline import Rates
from benchmarks.decode.worker import Worker
from benchmarks.machine import machine
from benchmarks.process import exit_on_sigterm
from benchmarks.report import Figures, Result, command_line, read_result
from benchmarks.studies.pages.models import OURS, PEERS, RESULT, speed_tables

CONTENDERS = {
    "everstream": "benchmarks.checkpoints.contenders:FromFile",
    "llama.cpp": "benchmarks.checkpoints.llama:FromFile",
    "rwkv": "benchmarks.checkpoints.contenders:Package",
}
HYBRIDS = {
    "everstream": "benchmarks.checkpoints.contenders:HybridFromFile",
    "llama.cpp": "benchmarks.checkpoints.llama:HybridFromFile",
}
MAMBA = {
    "everstream": "benchmarks.checkpoints.contenders:MambaFromFile",
    "llama.cpp": "benchmarks.checkpoints.llama:MambaFromFile",
}
CHAT = {
    "everstream": "benchmarks.checkpoints.contenders:Chat",
    "llama.cpp": "benchmarks.checkpoints.llama:Chat",
}
#: By family: the sizes that are measured, and who runs them.
FAMILIES = {
    "rwkv7": (tuple(shapes.CONFIGS), CONTENDERS),
    "qwen35": (("qwen35-0.8B",), HYBRIDS),
    "lfm2": (("lfm2-350M",), HYBRIDS),
    "mamba2_hybrid": (("granite-4.0-h-350M", "nemotron-3-nano-4B, 14 layers"), HYBRIDS),
    "mamba2": (("mamba2 130M", "mamba2 780M"), MAMBA),
    "smollm2": ((chat.SIZE,), CHAT),
}
#: Makes the file of a size and a type where it is missing.
FILES = {
    "rwkv7": shapes.file_of,
    "qwen35": hybrids.file_of,
    "lfm2": hybrids.file_of,
    "mamba2_hybrid": hybrids.file_of,
    "mamba2": folders.gguf_of,
    "smollm2": chat.file_of,
}


def points(options: argparse.Namespace, threads: int) -> Iterator[Point]:
    """What to measure with ``threads`` threads."""
    for size, dtype in product(options.size, options.dtype):
        for context, streams in product(options.context, options.streams):
            yield Point(size, dtype, streams, context, threads)
        yield Point(size, dtype, 1, 0, threads, "prefill")


def measure_all(options: argparse.Namespace, models: Path) -> Iterator[Figures]:
    """A row of figures for each point; each number of threads has processes of its own."""
    rates = Rates()
    contenders, file_of = FAMILIES[options.family][1], FILES[options.family]
    kinds = [*options.dtype, *(["pth"] if options.family == "rwkv7" else [])]
    for size, kind in product(options.size, kinds):
        file_of(models, size, kind)  # before it is measured
    for threads in options.threads:
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(Worker(contenders[name], models, threads))
                for name in (OURS, *options.peer)
            }
            for point in points(options, threads):
                found = measure(point, workers, rates, options.rounds, options.seconds)
                row = figures_of(found, (OURS,))
                print(json.dumps(row), file=sys.stderr, flush=True)
                yield row


def arguments(command: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, RESULT)
    cores = os.cpu_count() or 1
    parser.add_argument("--family", choices=FAMILIES, default="rwkv7")
    parser.add_argument("--size", nargs="+", help="default: all of the family")
    parser.add_argument("--context", type=int, nargs="+", default=[0], help="tokens of the past")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, min(2, cores)}))
    parser.add_argument("--peer", nargs="+", choices=PEERS, help="default: all of the family")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each turn")
    parser.add_argument("--models", type=Path, help="folder to keep the files in between runs")
    parser.add_argument(
        "--keep", action="store_true", help="keep the rows of the output that are not measured"
    )
    options = parser.parse_args(command)
    sizes, contenders = FAMILIES[options.family]
    options.size = options.size or list(sizes)
    options.peer = options.peer or [name for name in contenders if name != OURS]
    if unknown := [*({*options.size} - {*sizes}), *({*options.peer} - {*contenders})]:
        parser.error(f"{options.family} has no {unknown[0]}")
    if options.family != "rwkv7" and options.output == RESULT:
        options.output = RESULT.with_name(f"checkpoints_{options.family}.json")
    return options


def kept(options: argparse.Namespace) -> Figures:
    """The rows of the output that are not measured now, and the commands that gave them.

    Ends with an error where those were measured on another machine or for another time.
    """
    if not options.keep:
        return {"rows": []}
    before, here = read_result(options.output), machine()
    wanted = (options.rounds, options.seconds, here["cpu"], here["cores"])
    on = before["machine"]
    if (before["rounds"], before["seconds"], on["cpu"], on["cores"]) != wanted:
        sys.exit(f"--keep: {options.output} has other rounds, seconds or another machine")
    now = {astuple(point) for threads in options.threads for point in points(options, threads)}
    rows = [row for row in before["rows"] if astuple(point_of(row)) not in now]
    commands = [*before.get("earlier_commands", []), before["command"]]
    return {"earlier_commands": commands, "rows": rows}


def point_of(row: Figures) -> Point:
    """The point that a row was measured at."""
    return Point(**{field.name: row[field.name] for field in fields(Point)})


def main(command: Sequence[str] | None = None) -> None:
    """Measures, writes the result after each row, and prints the tables."""
    exit_on_sigterm()
    options = arguments(command)
    result = Result("checkpoints", options.output)
    figures: Figures = {"rounds": options.rounds, "seconds": options.seconds, **kept(options)}
    with tempfile.TemporaryDirectory() as folder:
        for row in measure_all(options, options.models or Path(folder)):
            figures["rows"].append(row)
            result.save(figures)
    print(speed_tables(figures["rows"]))
    result.finish(figures)


if __name__ == "__main__":
    main()
