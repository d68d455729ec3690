"""Tokens/s of pure decoding and of a prompt: our native runtime and its peers in one run.

    python -m benchmarks.decode --models FOLDER --output results.json

Peers are llama.cpp as a Llama and as an RWKV-7, transformers' `generate`, and PyTorch on our own
model, eager and compiled; all have random weights and as many parameters (`shapes`). At each
point they take turns for several rounds; a figure is the median of its rounds, followed by how far
they spread. A ratio is `gated` by the peer. A fraction is that of the roofline of this machine,
whose bandwidth was measured just before (`roofline`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.decode.peers import CONTENDERS, LOWER_LEVEL, NARROW, NATIVE_PEERS, OURS, Point
from benchmarks.decode.report import Row, figures_of, gather, measure, rate_tables
from benchmarks.decode.roofline import Rates
from benchmarks.decode.shapes import SIZES
from benchmarks.decode.worker import Worker
from benchmarks.process import exit_on_sigterm
from benchmarks.report import Result, command_line, write_result

#: What the contenders serve weights in, where they can.
DTYPES = ("float32", "bfloat16", "int8", "int4")
#: A long past is measured with one stream and with this many, in this type.
MANY_STREAMS = 64
FAR_DTYPE = "bfloat16"
#: `generate` copies its whole cache for every token.
MAX_COPIED_TOKENS = 8192
#: Where PyTorch is measured at few points, as it makes few tokens in a second.
SLOW_SIZE = "S2"


def points(options: argparse.Namespace) -> list[Point]:
    """What to measure, in an order that starts few processes: by threads, then size, then type."""
    result = []
    for threads, size, dtype in itertools.product(options.threads, options.size, options.dtype):
        if "decode" in options.mode:
            for streams, context in itertools.product(options.streams, options.contexts):
                far_ones = dtype == FAR_DTYPE and streams in (1, MANY_STREAMS)
                if not context or far_ones or options.all:
                    result.append(Point(size, dtype, streams, context, threads))
        if "prefill" in options.mode:
            result.append(Point(size, dtype, 1, 0, threads, "prefill"))
    return result


def takes_part(name: str, point: Point) -> bool:
    """Whether a contender is measured at ``point``: PyTorch only where it says something new."""
    if name in (*OURS, *NATIVE_PEERS, NARROW, LOWER_LEVEL):
        return True
    few = point.dtype == FAR_DTYPE and point.streams in (1, MANY_STREAMS)
    if name == "compile":
        return point.size != SLOW_SIZE and few and not point.context and point.mode == "decode"
    if point.dtype in ("int8", "int4") or (point.size == SLOW_SIZE and not few):
        return False
    is_past_short = point.streams == 1 and point.context <= MAX_COPIED_TOKENS
    return not point.context or (name == "generate" and is_past_short)


def measure_all(options: argparse.Namespace, models: Path) -> Iterator[Row]:
    """A row for each point; a contender keeps its process as long as the threads are the same."""
    rates = Rates()
    for threads, group in itertools.groupby(points(options), lambda point: point.threads):
        with ExitStack() as stack:
            workers = {
                name: stack.enter_context(Worker(name, models, threads)) for name in options.only
            }
            for point in group:
                there = {name: own for name, own in workers.items() if takes_part(name, point)}
                yield measure(point, there, rates, options.rounds, options.seconds)


def arguments(command: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    cores = os.cpu_count() or 1
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["S1", "S2"])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, MANY_STREAMS])
    parser.add_argument("--contexts", type=int, nargs="+", default=[0, 2048, 8192, 100_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, min(2, cores)])
    parser.add_argument("--mode", nargs="+", default=["decode", "prefill"])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument(
        "--all", action="store_true", help="long contexts in every type and number of streams"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.25, help="seconds of each turn")
    parser.add_argument("--quick", action="store_true", help="short run: S1, one thread")
    parser.add_argument("--models", type=Path, help="folder to keep the models in between runs")
    parser.add_argument("--gather", type=Path, nargs="+", help="earlier outputs to merge into one")
    options = parser.parse_args(command)
    if options.gather and not options.output:
        parser.error("--gather needs --output")
    if options.quick:
        options.size, options.dtype, options.threads = ["S1"], [FAR_DTYPE], [1]
        options.streams, options.contexts = [1, 8], [0, 2048]
        options.rounds, options.seconds = 2, 0.05
    return options


def main(command: Sequence[str] | None = None) -> None:
    """Measures, prints, and ends with the line of JSON."""
    exit_on_sigterm()
    options = arguments(command)
    if options.gather:
        write_result(options.output, {"benchmark": "decode", **gather(options.gather)})
        return
    result, rows = Result("decode", options.output), []
    with tempfile.TemporaryDirectory() as folder:
        for row in measure_all(options, options.models or Path(folder)):
            rows.append(row)
            _tell(row)
            figures = {
                "rounds": options.rounds,
                "seconds": options.seconds,
                "rows": [figures_of(row) for row in rows],
            }
            result.save(figures)
    for mode in options.mode:
        print(mode, *rate_tables(figures["rows"], mode), sep="\n\n")
    result.finish(figures)


def _tell(row: Row) -> None:
    """One line to stderr, as the whole takes minutes."""
    rates = ", ".join(f"{name} {turns.tokens_per_s:,.0f}" for name, turns in row.turns.items())
    skipped = "".join(f", no {name}: {reason}" for name, reason in row.skipped.items())
    print(f"{row.point}: {rates}{skipped}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
