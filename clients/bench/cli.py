"""The command ``everstream bench``: a sweep over loads, as a table, JSON and a plot.

everstream bench --concurrency 1,8,64 --ttft-limit 100 --itl-limit 20
everstream bench --rate 2,4,8 --duration 30 --plot sweep.png
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from clients.api_key import ApiKey
from clients.bench.figures import Limits, Summary, errors_of, summarize
from clients.bench.load import PROMPT, Load, Timed, run, unreachable
from clients.python.errors import EverstreamError
from clients.python.protocol import Protocol

#: Ids below this exist in every byte-level vocabulary.
NUM_SAFE_IDS = 256
#: Default limit of a server for concurrent requests of one socket.
MAX_SOCKET_REQUESTS = 64
#: Number of sockets over which the requests of a rate are distributed.
NUM_SOCKETS = 16

#: In characters; wider than any table.
MAX_WIDTH = 1000

Number = TypeVar("Number", int, float)


def bench(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[
        str,
        typer.Option(
            help="Levels of concurrent streams, comma-separated; each sends its requests in turn."
        ),
    ] = "1,4,16,64",
    rate: Annotated[
        str | None,
        typer.Option(
            help="Levels of requests per second (Poisson arrivals), instead of --concurrency."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests of each stream.")] = 4,
    duration: Annotated[
        float, typer.Option(min=0.1, help="Seconds of arrivals at each --rate.")
    ] = 20.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of each answer.")] = 128,
    per_socket: Annotated[
        int,
        typer.Option(min=1, max=MAX_SOCKET_REQUESTS, help="Number of streams that share a socket."),
    ] = 1,
    prompt: Annotated[str, typer.Option(help="Prompt of each request.")] = PROMPT,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="UTF-8 file of prompts, one per line, used in turn."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Length of a random prompt in tokens, instead of --prompt."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy; default: the server's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts, arrivals and answers.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the session of each request.")] = False,
    warm_up: Annotated[
        int, typer.Option(min=0, help="Number of requests before the first level.")
    ] = 1,
    ttft_limit: Annotated[
        float | None, typer.Option(help="Maximum TTFT of a good request in milliseconds.")
    ] = None,
    itl_limit: Annotated[
        float | None, typer.Option(help="Maximum mean ITL of a good request in milliseconds.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File to write the JSON to.")] = None,
    plot: Annotated[Path | None, typer.Option(help="File to draw a plot to (extra train).")] = None,
    api_key: ApiKey = None,
) -> None:
    """Measure a running server under load.

    Reports latency, throughput and goodput of each level.
    """
    try:
        Protocol(url, api_key)
        prompts = _prompts(prompt, prompt_file, prompt_tokens, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    load = Load(
        url=url,
        num_requests=requests,
        streams_per_socket=per_socket,
        max_tokens=max_tokens,
        prompts=prompts,
        temperature=temperature,
        seed=seed,
        keep=keep,
        api_key=api_key,
    )
    if rate is None:
        levels = [replace(load, num_streams=n) for n in _levels(concurrency, "concurrency", int)]
    else:
        levels = [_arriving(load, one, duration) for one in _levels(rate, "rate", float)]
    limits = Limits(ttft_limit, itl_limit)
    if plot is not None and find_spec("matplotlib") is None:
        raise _fail("--plot needs matplotlib: install it, or the extra train", 2)
    console = Console(highlight=False)
    try:
        summaries = list(_measure(load, warm_up, levels, limits, console))
    except (EverstreamError, OSError) as error:
        raise _fail(unreachable(error, url), 1) from error
    figures = {"limits": limits._asdict(), "levels": [asdict(one) for one in summaries]}
    line = json.dumps(figures, allow_nan=False)
    if output is not None:
        output.write_text(line + "\n", encoding="utf-8")
    if plot is not None:
        _plot(summaries, limits, plot)
    typer.echo(line)
    if any(one.errors for one in summaries):
        raise typer.Exit(1)


def _measure(
    load: Load, warm_up: int, levels: Sequence[Load], limits: Limits, console: Console
) -> Iterator[Summary]:
    if warm_up:
        asyncio.run(run(replace(load, num_streams=1, num_requests=warm_up, keep=False)))
    table = _table(levels[0].rate is None)
    failed: list[Timed] = []
    for number, level in enumerate(levels, start=1):
        typer.echo(f"level {number} of {len(levels)}: {_described(level)} ...", err=True)
        timed, seconds = asyncio.run(run(level))
        failed += [one for one in timed if one.error is not None]
        summary = summarize(level, timed, seconds, limits)
        table.add_row(*_cells(summary))
        yield summary
    width = Console(width=MAX_WIDTH).measure(table).maximum
    Console(highlight=False, width=width).print(table)
    for code, count in errors_of(failed).most_common():
        console.print(f"{count:,} requests ended by {code}", style="red")


def _described(level: Load) -> str:
    if level.rate is not None:
        return f"{level.num_requests:,} requests, {level.rate:g} due in a second"
    streams = "stream" if level.num_streams == 1 else "streams"
    requests = "request" if level.num_requests == 1 else "requests"
    return f"{level.num_streams:,} {streams} of {level.num_requests:,} {requests}"


def _arriving(load: Load, rate: float, duration_s: float) -> Load:
    num_requests = max(1, round(rate * duration_s))
    return replace(
        load, rate=rate, num_requests=num_requests, num_streams=NUM_SOCKETS, streams_per_socket=1
    )


def _table(concurrent: bool) -> Table:
    """Fits into 80 columns; a narrower terminal does not wrap its numbers."""
    table = Table(caption="p50/p99 in ms", box=SIMPLE, padding=(0, 1, 0, 0))
    first = "streams" if concurrent else "due/s"
    for name in (first, "tokens/s", "req/s", "good/s", "TTFT", "ITL", "request", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(summary: Summary) -> Iterator[str]:
    yield f"{summary.rate or summary.streams:g}"
    yield f"{summary.tokens_per_s:,.0f}"
    yield f"{summary.requests_per_s:.1f}"
    yield f"{summary.goodput_per_s:.1f}"
    for name in ("ttft", "itl", "latency"):
        yield "/".join(_ms(getattr(summary, f"{name}_p{percent}_ms")) for percent in (50, 99))
    yield f"{summary.errors:,}"


def _ms(time_ms: float | None) -> str:
    """At most three digits for times below a second."""
    if time_ms is None:
        return "-"
    return f"{time_ms:.1f}" if time_ms < 10 else f"{time_ms:.0f}"


def _levels(text: str, option: str, number: type[Number]) -> list[Number]:
    try:
        levels = [number(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or not all(0 < level < 1e6 for level in levels):
        raise _fail(f"--{option}: must be comma-separated numbers above 0", 2)
    return levels


def _prompts(
    prompt: str, file: Path | None, num_tokens: int | None, seed: int
) -> Sequence[str | Sequence[int]]:
    if num_tokens is not None:
        return [random.Random(seed).choices(range(NUM_SAFE_IDS), k=num_tokens)]
    if file is not None:
        lines = file.read_text(encoding="utf-8").split("\n")
        return [line for line in lines if line.strip()] or [PROMPT]
    return [prompt]


def _plot(summaries: Sequence[Summary], limits: Limits, path: Path) -> None:
    from clients.bench.plot import draw

    draw(summaries, limits, path)


def _fail(message: str, status: Literal[1, 2]) -> typer.Exit:
    typer.echo(f"everstream: {message}", err=True)
    return typer.Exit(status)


def main() -> None:
    """``python -m clients.bench``."""
    typer.run(bench)
