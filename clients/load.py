"""A load generator: ``python -m clients.load --url http://127.0.0.1:8000 --streams 64``.

Each stream is one WebSocket that runs its requests one after another. Latencies
are taken where the frame arrives: TTFT from sending ``generate`` to the first
token, inter-token latency from one token's frame to the next. The last line of
the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field

import orjson
from rich.console import Console
from rich.table import Table
from websockets.asyncio.client import connect

from clients.python.protocol import Protocol


@dataclass(frozen=True)
class Load:
    """What to send. The seed of request r of stream s is ``seed + s * num_requests + r``."""

    url: str
    num_streams: int = 8
    num_requests: int = 4
    max_tokens: int = 128
    prompt: str = "Once upon a time there was a little girl who lived in a house by the sea"
    temperature: float = 0.8
    seed: int = 0
    api_key: str | None = None


@dataclass
class Measured:
    """Raw times, in seconds, and counts."""

    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """One run's figures, as printed. Times in milliseconds."""

    streams: int
    requests: int
    tokens: int
    seconds: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p90_ms: float
    itl_p99_ms: float
    errors: int


async def run(load: Load) -> Summary:
    """Runs all streams at once, from when all of them are connected."""
    measured = Measured()
    ready = asyncio.Barrier(load.num_streams + 1)
    async with asyncio.TaskGroup() as group:
        for stream in range(load.num_streams):
            group.create_task(_stream(load, stream, ready, measured))
        await ready.wait()
        started = time.perf_counter()
    return summarize(load, measured, time.perf_counter() - started)


async def _stream(load: Load, stream: int, ready: asyncio.Barrier, measured: Measured) -> None:
    protocol = Protocol(load.url, load.api_key)
    async with connect(
        protocol.stream_url,
        additional_headers=protocol.headers,
        compression=None,
        max_size=None,
        ping_interval=None,
    ) as socket:
        await ready.wait()
        for number in range(load.num_requests):
            _, message = protocol.message(
                "generate",
                prompt=load.prompt,
                max_tokens=load.max_tokens,
                temperature=load.temperature,
                seed=load.seed + stream * load.num_requests + number,
                ignore_eos=True,
            )
            last = time.perf_counter()
            first = True
            await socket.send(message)
            async for frame in socket:
                now = time.perf_counter()
                event = orjson.loads(frame)
                if event["type"] == "token":
                    (measured.ttft_s if first else measured.inter_token_s).append(now - last)
                    first, last = False, now
                    measured.num_tokens += 1
                elif event["type"] != "started":
                    if event["type"] == "error":
                        measured.errors.append(event["error"]["code"])
                    break


def summarize(load: Load, measured: Measured, seconds: float) -> Summary:
    """The figures of a run that took ``seconds``."""
    return Summary(
        streams=load.num_streams,
        requests=load.num_streams * load.num_requests,
        tokens=measured.num_tokens,
        seconds=round(seconds, 3),
        tokens_per_s=round(measured.num_tokens / seconds, 1),
        ttft_p50_ms=_percentile_ms(measured.ttft_s, 0.50),
        ttft_p90_ms=_percentile_ms(measured.ttft_s, 0.90),
        ttft_p99_ms=_percentile_ms(measured.ttft_s, 0.99),
        itl_p50_ms=_percentile_ms(measured.inter_token_s, 0.50),
        itl_p90_ms=_percentile_ms(measured.inter_token_s, 0.90),
        itl_p99_ms=_percentile_ms(measured.inter_token_s, 0.99),
        errors=len(measured.errors),
    )


def _percentile_ms(times_s: list[float], share: float) -> float:
    """The nearest-rank percentile; NaN where nothing was measured."""
    if not times_s:
        return float("nan")
    ordered = sorted(times_s)
    rank = min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))
    return round(ordered[rank] * 1000, 3)


def main() -> int:
    """The command; 1 where any request failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=4, help="of each stream, one after another")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompt", default=Load.prompt)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key")
    options = parser.parse_args()
    load = Load(
        options.url,
        options.streams,
        options.requests,
        options.max_tokens,
        options.prompt,
        options.temperature,
        options.seed,
        options.api_key,
    )
    summary = asyncio.run(run(load))
    table = Table(title=f"{summary.streams} streams, {summary.tokens} tokens")
    values = asdict(summary)
    for name in values:
        table.add_column(name)
    table.add_row(*map(str, values.values()))
    Console(width=200).print(table)
    print(json.dumps(values))
    return 1 if summary.errors else 0


if __name__ == "__main__":
    sys.exit(main())
