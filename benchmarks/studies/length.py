"""Where does linear attention begin to pay? Time and memory of one layer against the text's length.

Training is forward and backward, prefill is forward alone; both read the whole text at once, as
`parallel` does. A point has a process to itself: the memory is the growth of that process's
`ru_maxrss` over a first pass, so it counts what the allocator takes, and not the input or torch.
The time is the fastest of the passes after it. A curve ends where a point takes too long or too
much.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Figures, Result, command_line, show_figures
from benchmarks.studies.drift.layers import attention_layer
from model.attention import MECHANISMS
from model.attention.base import Attention

BASELINE = "softmax"
MODES = ("training", "prefill")
WARM_UP_TOKENS = 64
#: Passes are timed until they took this long together.
TIMED_SECONDS, MAX_PASSES = 0.5, 20


@dataclass(frozen=True)
class Limits:
    """What a point may take; a curve ends with the first one that takes more."""

    seconds: float = 10.0
    bytes: int = 6 << 30


@dataclass(frozen=True)
class Point:
    """One length of one curve."""

    tokens: int
    seconds: float
    peak_bytes: int

    def figures(self) -> Figures:
        """For the line of JSON."""
        ms = round(self.seconds * 1e3, 3)
        return {"tokens": self.tokens, "ms": ms, "peak_bytes": self.peak_bytes}


MakeLayer = Callable[[], Attention]
Curve = list[Point]
#: Mode -> mechanism -> curve
Curves = dict[str, dict[str, Curve]]


def make_layer(name: str, hidden_size: int, num_heads: int) -> Attention:
    """One attention layer, the same every time."""
    return attention_layer(name, hidden_size, num_heads, torch.Generator().manual_seed(0))


def one_pass(layer: Attention, mode: str, x: Tensor) -> None:
    """A forward pass over [1, T, D], in training with the gradients of weights and input."""
    if mode == "prefill":
        with torch.no_grad():
            layer.eval().parallel(x)
        return
    layer.zero_grad()
    x = x.detach().requires_grad_()
    losses: list[Tensor] = []
    y = layer.train().parallel(x, losses)
    (y.sum() + sum(losses)).backward()


def measure_here(layer: Attention, mode: str, num_tokens: int, limits: Limits) -> Point:
    """One point, in this process; its memory is right only if nothing larger ran here before.

    The first pass is not timed, unless it took so long that there will be no other.
    """
    hidden_size = layer.config.hidden_size
    one_pass(layer, mode, torch.randn(1, WARM_UP_TOKENS, hidden_size))
    x = torch.randn(1, num_tokens, hidden_size)
    before = peak_bytes()
    first = timed(lambda: one_pass(layer, mode, x))
    peak = peak_bytes() - before
    times = [first] if first > limits.seconds else []
    while len(times) < MAX_PASSES and sum(times) < TIMED_SECONDS:
        times.append(timed(lambda: one_pass(layer, mode, x)))
    return Point(num_tokens, min(times), peak)


def peak_bytes() -> int:
    """The most that was ever resident of this process; in a forked one since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed(work: Callable[[], None]) -> float:
    """The seconds it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_apart(make: MakeLayer, mode: str, num_tokens: int, limits: Limits) -> Point | None:
    """One point in a process of its own; None where its memory was not to be had.

    It is forked from one that has imported torch and done nothing else: what this
    process has taken and given back would be there for the layer to use.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(writer, make, mode, num_tokens, limits))
    process.start()
    writer.close()
    try:
        point: Point | str | None = reader.recv()
    except EOFError:
        point = "it was killed"
    finally:
        process.join()
        reader.close()
    if isinstance(point, str):
        raise RuntimeError(f"the process of {mode} at {num_tokens} tokens died: {point}")
    return point


def child(writer: Connection, make: MakeLayer, mode: str, num_tokens: int, limits: Limits) -> None:
    """Sends a point, None, or the error.

    The limit on memory keeps a bad guess from the whole machine.
    """
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * limits.bytes, resource.RLIM_INFINITY))
    try:
        writer.send(measure_here(make(), mode, num_tokens, limits))
    except Exception as error:
        writer.send(None if "can't allocate memory" in str(error) else repr(error))


def measure_curve(make: MakeLayer, mode: str, lengths: list[int], limits: Limits) -> Curve:
    """Points in order of length, up to the first that takes too much."""
    curve: Curve = []
    for length in lengths:
        point = measure_apart(make, mode, length, limits)
        if point is None:
            break
        curve.append(point)
        if point.seconds > limits.seconds or point.peak_bytes > limits.bytes:
            break
    return curve


def crossing(curve: Curve, baseline: Curve, what: Callable[[Point], float]) -> float | None:
    """The length from which ``curve`` stays below ``baseline``; None where it ends above.

    Between two lengths both are taken for straight on logarithmic axes. 0 stands
    for "below from the first length on".
    """
    pairs = [(a.tokens, math.log(what(a) / what(b))) for a, b in zip(curve, baseline, strict=False)]
    if pairs[-1][1] >= 0:
        return None
    result = 0.0
    for (left, above), (right, below) in itertools.pairwise(pairs):
        if above >= 0 > below:
            result = left * (right / left) ** (above / (above - below))
    return result


MEASURES: dict[str, Callable[[Point], float]] = {
    "time": lambda point: point.seconds,
    "memory": lambda point: max(point.peak_bytes, 1),
}


def crossings(curves: Curves) -> dict[str, dict[str, dict[str, float | None]]]:
    """By mode, mechanism and measure. A mechanism without the baseline is left out."""
    return {
        mode: {
            name: {
                measure: crossing(curve, by_name[BASELINE], what)
                for measure, what in MEASURES.items()
            }
            for name, curve in by_name.items()
            if name != BASELINE and BASELINE in by_name
        }
        for mode, by_name in curves.items()
    }


def print_tables(curves: Curves) -> None:
    """Milliseconds and MiB by length, and where each begins to win."""
    found = crossings(curves)
    cells: dict[str, Callable[[Point], float]] = {
        "ms": lambda point: point.seconds * 1e3,
        "MiB": lambda point: point.peak_bytes / 2**20,
    }
    for mode, by_name in curves.items():
        for (unit, cell), measure in zip(cells.items(), MEASURES, strict=True):
            rows: Figures = {}
            for name, curve in by_name.items():
                rows[name] = {str(point.tokens): cell(point) for point in curve}
                if name in found[mode]:
                    rows[name]["below softmax from"] = words(found[mode][name][measure])
            show_figures(f"{mode}, {unit} by number of tokens", rows)


def words(start: float | None) -> str:
    """A crossing as a cell of a table."""
    if start is None:
        return "never"
    return f"{start:,.0f}" if start else "the start"


def plot(curves: Curves, path: Path) -> None:
    """Time and memory, training and prefill."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    grid: Any = figure.subplots(2, 2, sharex=True, sharey="row")
    for column, (mode, by_name) in enumerate(curves.items()):
        for index, (name, curve) in enumerate(by_name.items()):
            style = {"color": colormaps["tab20"](index % 20), "lw": 1.2, "marker": "."}
            if name == BASELINE:
                style |= {"color": "black", "lw": 2.4}
            lengths = [point.tokens for point in curve]
            grid[0, column].plot(lengths, [p.seconds * 1e3 for p in curve], label=name, **style)
            grid[1, column].plot(lengths, [p.peak_bytes / 2**20 for p in curve], **style)
        grid[0, column].set_title(mode)
        grid[1, column].set_xlabel("tokens")
    grid[0, 0].set_ylabel("milliseconds")
    grid[1, 0].set_ylabel("peak memory, MiB")
    for axes in grid.flat:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path, dpi=100)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, that of the process for None."""
    parser = command_line(__doc__)
    parser.add_argument("--mechanisms", nargs="+", choices=list(MECHANISMS), metavar="NAME")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[256 << number for number in range(7)]
    )
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="PNG file to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measures, prints, plots, and ends with the line of JSON."""
    options = arguments(argv)
    result = Result("length", options.output)
    torch.set_num_threads(options.threads)
    lengths = sorted(options.lengths)
    curves: Curves = {mode: {} for mode in MODES}
    for name in options.mechanisms or MECHANISMS:
        make = functools.partial(make_layer, name, options.hidden_size, options.heads)
        for mode in MODES:
            curves[mode][name] = measure_curve(make, mode, lengths, Limits())
        print(f"{name} is done", file=sys.stderr, flush=True)
    print_tables(curves)
    if options.plot:
        plot(curves, options.plot)
    figures: Figures = {
        "hidden_size": options.hidden_size,
        "heads": options.heads,
        "threads": options.threads,
        "below_softmax_from": crossings(curves),
        "curves": {
            mode: {name: [point.figures() for point in curve] for name, curve in by_name.items()}
            for mode, by_name in curves.items()
        },
    }
    result.finish(figures)


if __name__ == "__main__":
    main()
