"""Does rounding add up in a stream without end? One layer in float32 against itself in float64.

The reference is the same layer with float64 weights under `Float64`, which turns every cast to
float32 inside it into one to float64, so that any mechanism of the registry can be asked. It says
how rounding grows; that the mechanism is right at all is what the contract's oracles are for.

Three parts: the error after up to a million random tokens, in chunks and one by one; the same for
`elu` with its sums stored in narrower formats; and whether a state that has seen 1e8 tokens still
takes in new ones. For the last, the sums of `PAST_TOKENS` tokens are multiplied up to 1e8 (decayed
and bounded tensors stay as they are), and the layer reads tokens of another kind: how far is the
state's move from the one in float64? For comparison, the same with the sums stored in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.report import Figures, Result, command_line, show_figures
from benchmarks.studies.drift.layers import HEAD_DIM, NAMES, Layer, constant_state, make_layer, sums
from model.attention.base import State

CHUNK_TOKENS = 1024
#: An error is taken over this many tokens up to the one that it is named for.
WINDOW_TOKENS = 64
PAST_TOKENS = 8192
SIMULATED_TOKENS = 100_000_000
#: A cache that grows is read no further than this.
MAX_CACHE_TOKENS = 10_000
#: How it was read or stored -> tokens -> relative error.
Errors = dict[str, dict[int, float]]

NARROW = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Float64(TorchFunctionMode):
    """While active, what asks for float32 gets float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wide = torch.float64
        args = tuple(wide if arg is torch.float32 else arg for arg in args)
        kwargs = {n: wide if a is torch.float32 else a for n, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


class Reader:
    """One layer with its state, reading one stream."""

    def __init__(self, layer: Layer, wide: bool = False, stored: torch.dtype | None = None) -> None:
        """``wide``: in float64. ``stored``: the format in which its sums lie between two calls."""
        self._layer = copy.deepcopy(layer).double() if wide else layer
        self._dtype = torch.float64 if wide else torch.float32
        self._mode = Float64 if wide else contextlib.nullcontext
        self._stored = stored
        self.position = 0
        with self._mode():
            self.state = self._layer.empty_state(1, torch.device("cpu"))

    def chunk(self, x: Tensor) -> Tensor:
        """Reads [T, D] at once; the outputs [T, D] in float64."""
        return self._read(self._layer.chunk, x.unsqueeze(0), len(x)).squeeze(0)

    def step(self, x: Tensor) -> Tensor:
        """Reads [T, D] token by token; the outputs [T, D] in float64."""
        return torch.cat([self._read(self._layer.step, token, 1) for token in x.split(1)])

    def _read(self, form: Callable[..., tuple[Tensor, State]], x: Tensor, count: int) -> Tensor:
        position = torch.tensor([self.position])
        with torch.no_grad(), self._mode():
            y, self.state = form(x.to(self._dtype), self.state, position)
        if self._stored:
            for name in sums(self._layer):
                tensor = self.state[name]
                self.state[name] = tensor.to(self._stored).to(tensor.dtype)
        self.position += count
        return y.double()


def pieces(stops: list[int], generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
    """A stream of normal tokens [T, D] in chunks that end at each stop; with the tokens so far."""
    position = 0
    for stop in stops:
        while position < stop:
            count = min(CHUNK_TOKENS, stop - position)
            position += count
            yield position, torch.randn(count, HEAD_DIM, generator=generator)


def relative(found: Tensor, wanted: Tensor) -> float:
    """Root of the mean square of the difference, over that of what was wanted."""
    return float(f"{float((found - wanted).norm() / wanted.norm()):.3g}")


def growth(layer: Layer, stops: list[int], max_steps: int, seed: int) -> Errors:
    """Errors in chunks, and token by token up to ``max_steps``, at each of ``stops``."""
    wide, chunks, steps = Reader(layer, wide=True), Reader(layer), Reader(layer)
    errors: Errors = {"chunks": {}, "steps": {}}
    for position, x in pieces(stops, torch.Generator().manual_seed(seed)):
        wanted, by_chunks = wide.chunk(x), chunks.chunk(x)
        by_steps = steps.step(x) if position <= max_steps else None
        if position in stops:
            last = slice(-WINDOW_TOKENS, None)
            errors["chunks"][position] = relative(by_chunks[last], wanted[last])
            if by_steps is not None:
                errors["steps"][position] = relative(by_steps[last], wanted[last])
    return errors


def narrow(layer: Layer, stops: list[int], seed: int) -> Errors:
    """Errors token by token with the sums stored in each of `NARROW`, and as they are."""
    wide = Reader(layer, wide=True)
    readers = {"as it is": Reader(layer)}
    readers |= {name: Reader(layer, stored=dtype) for name, dtype in NARROW.items()}
    errors: Errors = {name: {} for name in readers}
    for position, x in pieces(stops, torch.Generator().manual_seed(seed)):
        wanted = wide.chunk(x)
        for name, reader in readers.items():
            found = reader.step(x)
            if position in stops:
                last = slice(-WINDOW_TOKENS, None)
                errors[name][position] = relative(found[last], wanted[last])
    return errors


def simulate(layer: Layer, num_tokens: int, seed: int, past_tokens: int = PAST_TOKENS) -> Figures:
    """How a state after `SIMULATED_TOKENS` takes in ``num_tokens`` of another kind."""
    generator = torch.Generator().manual_seed(seed)
    readers = {
        "wide": Reader(layer, wide=True),
        "chunks": Reader(layer),
        "steps": Reader(layer),
        "float32": Reader(layer, stored=torch.float32),
    }
    start = long_past(layer, past_tokens, generator)
    for reader in readers.values():
        reader.position = SIMULATED_TOKENS
        reader.state = {n: t.to(reader.state[n].dtype) for n, t in start.items()}
    shift = torch.randn(HEAD_DIM, generator=generator)
    for _, x in pieces([num_tokens], generator):
        x = 0.5 * x + shift
        outputs = {
            name: reader.chunk(x) if name in ("wide", "chunks") else reader.step(x)
            for name, reader in readers.items()
        }
    last, wide = slice(-WINDOW_TOKENS, None), readers["wide"].state
    figures: Figures = {"output": {}, "state": {}}
    for name in ("chunks", "steps", "float32"):
        if sums(layer) or name != "float32":
            figures["output"][name] = relative(outputs[name][last], outputs["wide"][last])
        if sums(layer):
            figures["state"][name] = max(
                relative(
                    unscaled(readers[name].state, sum_, wide) - unscaled(start, sum_, wide),
                    unscaled(wide, sum_, wide) - unscaled(start, sum_, wide),
                )
                for sum_ in sums(layer)
            )
    return figures


def long_past(layer: Layer, past_tokens: int, generator: torch.Generator) -> State:
    """The state after so many, its sums multiplied up; in values that float32 holds exactly."""
    reader = Reader(layer, wide=True)
    reader.position = SIMULATED_TOKENS - past_tokens
    for _, x in pieces([past_tokens], generator):
        reader.chunk(x)
    state = dict(reader.state)
    for name in sums(layer):
        state[name] = state[name] * (SIMULATED_TOKENS // past_tokens)
    return {n: t.to(torch.float32) if t.is_floating_point() else t for n, t in state.items()}


def unscaled(state: State, name: str, reference: State) -> Tensor:
    """A sum in float64; where it is relative to a running maximum, to that of ``reference``."""
    tensor = state[name].double()
    if "max" in state:
        factor = (state["max"].double() - reference["max"].double()).exp()
        tensor = tensor * factor.reshape(*factor.shape, *[1] * (tensor.dim() - factor.dim()))
    return tensor


def print_tables(growths: dict[str, Errors], narrows: Errors, simulations: Figures) -> None:
    """The three parts."""
    for form in ("chunks", "steps"):
        rows = {name: errors[form] for name, errors in growths.items()}
        show_figures(f"relative error of the output by tokens, read in {form}", rows)
    show_figures("elu by tokens, its sums stored in", narrows)
    moves = {
        name: {
            f"{what}, {form}": error for what in figures for form, error in figures[what].items()
        }
        for name, figures in simulations.items()
    }
    title = f"after {SIMULATED_TOKENS:,} tokens: error of the state's move, and of the output"
    show_figures(title, moves)


def plot(growths: dict[str, Errors], narrows: Errors, simulations: Figures, path: Path) -> None:
    """Growth in chunks and in steps, `elu` in narrow formats, and the move after 1e8 tokens."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), layout="constrained")
    grid: Any = figure.subplots(2, 2)
    colors: Figures = {name: colormaps["tab20"](i % 20) for i, name in enumerate(growths)}
    colors |= {"softmax": "black"}
    for axes, form in zip(grid[0], ("chunks", "steps"), strict=True):
        for name, errors in growths.items():
            xy = list(errors[form].items())
            axes.plot(*zip(*xy, strict=True), marker=".", color=colors[name], label=name)
        axes.set_title(f"float32 layer, read in {form}", fontsize=10)
    for name, by_stop in narrows.items():
        grid[1, 0].plot(*zip(*by_stop.items(), strict=True), marker=".", label=name)
    grid[1, 0].set_title("elu, its sums stored in", fontsize=10)
    if narrows:
        grid[1, 0].legend(fontsize=8)
    for axes in (*grid[0], grid[1, 0]):
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="relative error of the output")
        axes.grid(alpha=0.3)
    moved = {name: s["state"] for name, s in simulations.items() if s["state"]}
    for offset, (form, label) in enumerate(
        (("steps", "as it is"), ("float32", "sums stored in float32"))
    ):
        places = [i + 0.4 * offset for i in range(len(moved))]
        grid[1, 1].bar(places, [m[form] for m in moved.values()], width=0.4, label=label)
    grid[1, 1].set_xticks([i + 0.2 for i in range(len(moved))], list(moved), rotation=60)
    grid[1, 1].set(yscale="log", ylim=(1e-9, 100), ylabel="relative error of the state's move")
    grid[1, 1].set_title(f"new tokens after {SIMULATED_TOKENS:,}", fontsize=10)
    grid[1, 1].legend(fontsize=8, loc="upper left", ncols=2)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=100)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, that of the process for None."""
    parser = command_line(__doc__)
    parser.add_argument("--mechanisms", nargs="+", choices=NAMES, metavar="NAME")
    parser.add_argument("--stops", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument(
        "--max-steps", type=int, default=10_000, help="maximum tokens read one at a time"
    )
    parser.add_argument("--narrow-stops", type=int, nargs="+", default=[1_000, 4_000, 20_000])
    parser.add_argument("--simulated-steps", type=int, default=2_000, help="tokens after 1e8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="PNG file to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measures, prints, plots, and ends with the line of JSON."""
    options = arguments(argv)
    result = Result("drift", options.output)
    torch.set_num_threads(options.threads)
    growths: dict[str, Errors] = {}
    simulations: Figures = {}
    names = options.mechanisms or NAMES
    for name in names:
        started = time.perf_counter()
        layer = make_layer(name, torch.Generator().manual_seed(options.seed))
        stops = sorted(options.stops)
        if constant_state(layer):
            simulations[name] = simulate(layer, options.simulated_steps, options.seed + 1)
        else:
            stops = [stop for stop in stops if stop <= MAX_CACHE_TOKENS]
        growths[name] = growth(layer, stops, options.max_steps, options.seed + 1)
        seconds = time.perf_counter() - started
        print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    narrows: Errors = {}
    if "elu" in names:
        layer = make_layer("elu", torch.Generator().manual_seed(options.seed))
        narrows = narrow(layer, sorted(options.narrow_stops), options.seed + 1)
    print_tables(growths, narrows, simulations)
    if options.plot:
        plot(growths, narrows, simulations, options.plot)
    figures: Figures = {
        "head_dim": HEAD_DIM,
        "seed": options.seed,
        "growth": growths,
        "elu_stored_in": narrows,
        "after_1e8": simulations,
    }
    result.finish(figures)


if __name__ == "__main__":
    main()
