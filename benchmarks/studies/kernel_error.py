"""How far are random features from the softmax kernel? Error against the number of features.

The kernel is ``exp(q . k / sqrt(K))`` over all pairs of random queries and keys; the attention
output is its weighted mean of random values. Both are compared in float64 with what the draws of
`model.ops.exponential` give: positive and trigonometric features, rows orthogonal or not. An
error is a root mean square, relative to that of the exact result. A width of m features is what a
state pays for: m rows of positive ones, m/2 rows of trigonometric ones (a sine and a cosine each).
The baseline needs no features: a constant for the kernel, the plain mean of all values.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Figures, Result, command_line, show_figures
from model.ops.exponential import (
    gaussian_projection,
    log_positive_features,
    trigonometric_features,
)

#: name -> (trigonometric, orthogonal)
KINDS = {
    "positive, orthogonal": (False, True),
    "positive, independent": (False, False),
    "sin/cos, orthogonal": (True, True),
    "sin/cos, independent": (True, False),
}
COLORS = ("tab:blue", "tab:cyan", "tab:red", "tab:orange")
QUANTITIES = {"kernel": "kernel", "output": "attention output"}


@dataclass(frozen=True)
class Setting:
    """Queries and keys of ``dim`` elements, each of deviation ``scale``."""

    dim: int
    scale: float

    @property
    def title(self) -> str:
        return f"K = {self.dim}, deviation {self.scale:g}"


@dataclass(frozen=True)
class Inputs:
    """Scaled queries and keys and values, [L, K] float64, and what softmax makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    kernel: Tensor
    output: Tensor


@dataclass(frozen=True)
class Error:
    """Relative errors of one draw, and how many queries met a denominator that is not positive."""

    kernel: float
    output: float
    lost_queries: int


def make_inputs(setting: Setting, length: int, generator: torch.Generator) -> Inputs:
    """Normal queries, keys and values; q and k carry the factor K^(-1/4) afterwards."""
    shape = (3, length, setting.dim)
    q, k, v = torch.randn(shape, generator=generator, dtype=torch.float64)
    factor = setting.scale * setting.dim**-0.25
    q, k = q * factor, k * factor
    kernel = (q @ k.T).exp()
    return Inputs(q, k, v, kernel, weighted_mean(kernel, v))


def weighted_mean(weights: Tensor, v: Tensor) -> Tensor:
    """Attention as it is: nothing is done about denominators that are negative or small."""
    return weights @ v / weights.sum(dim=1, keepdim=True)


def estimate(kind: str, projection: Tensor, inputs: Inputs) -> Tensor:
    """The kernel's estimate [L, L] from one projection [rows, K]."""
    trigonometric, _ = KINDS[kind]
    if trigonometric:
        phi_q, phi_k = (trigonometric_features(x, projection) for x in (inputs.q, inputs.k))
    else:
        phi_q, phi_k = (log_positive_features(x, projection).exp() for x in (inputs.q, inputs.k))
    return phi_q @ phi_k.T / len(projection)


def one_draw(kind: str, width: int, inputs: Inputs, generator: torch.Generator) -> Error:
    """The errors of one projection with ``width`` features."""
    trigonometric, orthogonal = KINDS[kind]
    num_rows = width // 2 if trigonometric else width
    dim = inputs.q.shape[1]
    kernel = estimate(
        kind, gaussian_projection(num_rows, dim, generator, orthogonal).double(), inputs
    )
    return Error(
        kernel=relative(kernel, inputs.kernel),
        output=relative(weighted_mean(kernel, inputs.v), inputs.output),
        lost_queries=int((kernel.sum(dim=1) <= 0).sum()),
    )


def relative(found: Tensor, wanted: Tensor) -> float:
    """Root of the mean square of the difference, over that of what was wanted."""
    return float((found - wanted).norm() / wanted.norm())


def summary(errors: list[Error], length: int) -> Figures:
    """Mean and spread over the draws, in a form that JSON has room for."""
    result: Figures = {}
    for quantity in QUANTITIES:
        values = torch.tensor([getattr(error, quantity) for error in errors], dtype=torch.float64)
        low, median, high = values.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
        result[quantity] = {
            "mean": float(f"{values.mean():.4g}"),
            "deviation": float(f"{values.std():.4g}"),
            "p10": float(f"{low:.4g}"),
            "median": float(f"{median:.4g}"),
            "p90": float(f"{high:.4g}"),
        }
    lost = sum(error.lost_queries for error in errors) / (len(errors) * length)
    return {**result, "queries_with_bad_denominator": round(lost, 5)}


def without_features(inputs: Inputs) -> Figures:
    """The errors of the constant nearest to the kernel, and of the mean of all values."""
    constant = inputs.kernel.mean().expand_as(inputs.kernel)
    return {
        "kernel": round(relative(constant, inputs.kernel), 4),
        "output": round(relative(weighted_mean(constant, inputs.v), inputs.output), 4),
    }


@dataclass(frozen=True)
class Errors:
    """One setting: summaries by kind and width, and the errors of using no features."""

    setting: Setting
    errors: dict[str, dict[int, Figures]]
    without_features: Figures


def measure(setting: Setting, widths: list[int], num_draws: int, length: int, seed: int) -> Errors:
    """Every kind and width sees the same inputs, each draw a projection of its own."""
    generator = torch.Generator().manual_seed(seed)
    inputs = make_inputs(setting, length, generator)
    errors = {
        kind: {
            width: summary(
                [one_draw(kind, width, inputs, generator) for _ in range(num_draws)], length
            )
            for width in widths
        }
        for kind in KINDS
    }
    return Errors(setting, errors, without_features(inputs))


def print_tables(results: list[Errors]) -> None:
    """For each setting and quantity, the median error by kind and width."""
    for result in results:
        for quantity, label in QUANTITIES.items():
            without = result.without_features[quantity]
            title = f"{result.setting.title}: median error of the {label}; {without:.2f} without"
            rows = {
                kind: {width: errors[quantity]["median"] for width, errors in by_width.items()}
                for kind, by_width in result.errors.items()
            }
            show_figures(title, rows)


def plot(results: list[Errors], path: Path) -> None:
    """Median of the draws as a line, their mean as a dot, the middle four fifths as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(results), 6.4), layout="constrained")
    grid: Any = figure.subplots(2, len(results), sharex=True, sharey="row", squeeze=False)
    for column, result in enumerate(results):
        for axes, (quantity, label) in zip(grid[:, column], QUANTITIES.items(), strict=True):
            draw(axes, result, quantity)
            if column == 0:
                axes.set_ylabel(f"relative error of the {label}")
        grid[0, column].set_title(result.setting.title, fontsize=10)
        grid[1, column].set_xlabel("features m")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=100)


def draw(axes: Any, result: Errors, quantity: str) -> None:
    """One panel."""
    for color, (kind, by_width) in zip(COLORS, result.errors.items(), strict=True):
        widths, values = list(by_width), [by_width[width][quantity] for width in by_width]
        lines = {name: [value[name] for value in values] for name in values[0]}
        axes.plot(widths, lines["median"], color=color, label=kind)
        axes.plot(widths, lines["mean"], ".", color=color, markersize=5)
        axes.fill_between(widths, lines["p10"], lines["p90"], color=color, alpha=0.15, lw=0)
    axes.axhline(
        result.without_features[quantity], color="black", ls="--", lw=1, label="without features"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.03, 3000)
    axes.grid(alpha=0.3)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, that of the process for None."""
    parser = command_line(__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64], help="head dimensions K")
    parser.add_argument(
        "--scales", type=float, nargs="+", default=[0.5, 1.0], help="standard deviations of q"
    )
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128, 256, 512, 1024]
    )
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--length", type=int, default=256, help="number of queries and of keys")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="PNG file to write")
    options = parser.parse_args(argv)
    if any(width < 2 or width % 2 for width in options.widths):
        parser.error("widths must be even")
    return options


def main(argv: list[str] | None = None) -> None:
    """Measures, prints, plots, and ends with the line of JSON."""
    options = arguments(argv)
    result = Result("kernel_error", options.output)
    torch.set_num_threads(options.threads)
    results = [
        measure(Setting(dim, scale), options.widths, options.draws, options.length, options.seed)
        for dim in options.dims
        for scale in options.scales
    ]
    print_tables(results)
    if options.plot:
        plot(results, options.plot)
    figures: Figures = {
        "draws": options.draws,
        "length": options.length,
        "seed": options.seed,
        "settings": [
            {
                "dim": result.setting.dim,
                "scale": result.setting.scale,
                "without_features": result.without_features,
                "errors": result.errors,
            }
            for result in results
        ],
    }
    result.finish(figures)


if __name__ == "__main__":
    main()
