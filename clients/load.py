"""A load generator: ``python -m clients.load --url http://127.0.0.1:8000 --streams 64``.

Each stream runs its requests one after another, over a WebSocket of its own or
one that it shares. Latencies are taken where the frame arrives: TTFT from
sending ``generate`` to the first token, inter-token latency from one token's
frame to the next. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from clients.python.errors import EverstreamError
from clients.python.protocol import Protocol, handshake_error

PROMPT = "Once upon a time there was a little girl who lived in a house by the sea"
#: Ids below it exist in every byte-level vocabulary.
NUM_SAFE_IDS = 256


@dataclass(frozen=True)
class Load:
    """What to send.

    Request r of stream s has the number ``n = s * num_requests + r``, the seed
    ``seed + n`` and the prompt ``prompts[n % len(prompts)]``. With ``keep`` each
    has a session of its own that stays.
    """

    url: str
    num_streams: int = 8
    num_requests: int = 4
    streams_per_socket: int = 1
    max_tokens: int = 128
    prompts: Sequence[str | Sequence[int]] = (PROMPT,)
    temperature: float = 0.8
    seed: int = 0
    keep: bool = False
    api_key: str | None = None


@dataclass
class Measured:
    """Raw times, in seconds, and counts. ``errors`` has a code for each failed request."""

    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """One run's figures, as printed. Times in milliseconds, None where nothing was measured."""

    streams: int
    requests: int
    tokens: int
    seconds: float
    tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p90_ms: float | None
    itl_p99_ms: float | None
    errors: int


async def run(load: Load) -> tuple[Summary, Measured]:
    """Runs all streams at once, from when all of them are connected.

    Raises `EverstreamError` or OSError where a socket cannot be opened; what
    fails later is counted.
    """
    protocol = Protocol(load.url, load.api_key)
    first_of = range(0, load.num_streams, load.streams_per_socket)
    sockets = await _connect(protocol, len(first_of))
    measured = Measured()
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for first, socket in zip(first_of, sockets, strict=True):
            last = min(first + load.streams_per_socket, load.num_streams)
            streams = [_Stream(load, stream) for stream in range(first, last)]
            group.create_task(_drive(socket, protocol, streams, measured))
    seconds = time.perf_counter() - started
    await asyncio.gather(*(socket.close() for socket in sockets))
    return summarize(load, measured, seconds), measured


async def _connect(protocol: Protocol, num_sockets: int) -> list[ClientConnection]:
    try:
        return await asyncio.gather(
            *(
                connect(
                    protocol.stream_url,
                    additional_headers=protocol.headers,
                    compression=None,
                    max_size=None,
                    ping_interval=None,
                )
                for _ in range(num_sockets)
            )
        )
    except InvalidHandshake as error:
        raise handshake_error(error) from error


class _Stream:
    """A stream's place in its requests, and the time of its last event."""

    def __init__(self, load: Load, stream: int) -> None:
        first = stream * load.num_requests
        self._load = load
        self._numbers = iter(range(first, first + load.num_requests))
        self.num_left = load.num_requests
        self.waits_for_first = True
        self.last_s = 0.0

    def next_request(self) -> dict[str, Any] | None:
        """The fields of the next request, or None after the last one."""
        number = next(self._numbers, None)
        if number is None:
            return None
        load = self._load
        self.waits_for_first = True
        return {
            "prompt": load.prompts[number % len(load.prompts)],
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "seed": load.seed + number,
            "ignore_eos": True,
            "keep": load.keep,
        }


async def _drive(
    socket: ClientConnection, protocol: Protocol, streams: list[_Stream], measured: Measured
) -> None:
    """Runs the streams of one socket to their ends; a socket that ends fails what is left."""
    running: dict[str, _Stream] = {}

    async def begin(stream: _Stream) -> None:
        if (fields := stream.next_request()) is None:
            return
        request_id, message = protocol.message("generate", **fields)
        running[request_id] = stream
        stream.last_s = time.perf_counter()
        await socket.send(message, text=True)

    try:
        for stream in streams:
            await begin(stream)
        while running:
            event = orjson.loads(await socket.recv(decode=False))
            stream = running[event["request_id"]]
            if event["type"] == "token":
                _count_token(stream, measured, time.perf_counter())
            elif event["type"] != "started":
                if (code := _failure(event)) is not None:
                    measured.errors.append(code)
                stream.num_left -= 1
                del running[event["request_id"]]
                await begin(stream)
    except ConnectionClosed:
        measured.errors += ["connection_lost"] * sum(stream.num_left for stream in streams)


def _count_token(stream: _Stream, measured: Measured, now_s: float) -> None:
    times = measured.ttft_s if stream.waits_for_first else measured.inter_token_s
    times.append(now_s - stream.last_s)
    stream.waits_for_first, stream.last_s = False, now_s
    measured.num_tokens += 1


def _failure(event: dict[str, Any]) -> str | None:
    """The code of what ended a request too early, or None for a proper end."""
    if event["type"] == "error":
        return str(event["error"]["code"])
    return None if event["finish_reason"] in ("length", "stop") else str(event["finish_reason"])


def summarize(load: Load, measured: Measured, seconds: float) -> Summary:
    """The figures of a run that took ``seconds``."""
    return Summary(
        streams=load.num_streams,
        requests=load.num_streams * load.num_requests,
        tokens=measured.num_tokens,
        seconds=round(seconds, 6),
        tokens_per_s=round(measured.num_tokens / seconds, 1),
        ttft_p50_ms=_percentile_ms(measured.ttft_s, 50),
        ttft_p90_ms=_percentile_ms(measured.ttft_s, 90),
        ttft_p99_ms=_percentile_ms(measured.ttft_s, 99),
        itl_p50_ms=_percentile_ms(measured.inter_token_s, 50),
        itl_p90_ms=_percentile_ms(measured.inter_token_s, 90),
        itl_p99_ms=_percentile_ms(measured.inter_token_s, 99),
        errors=len(measured.errors),
    )


def _percentile_ms(times_s: list[float], percent: int) -> float | None:
    """The nearest-rank percentile: the least time that ``percent`` of all do not exceed."""
    if not times_s:
        return None
    rank = max(1, math.ceil(percent * len(times_s) / 100))
    return round(sorted(times_s)[rank - 1] * 1000, 3)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _arguments() -> Load:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=_positive, default=8)
    parser.add_argument("--per-socket", type=_positive, default=1, help="streams that share one")
    parser.add_argument("--requests", type=_positive, default=4, help="of each stream, in turn")
    parser.add_argument("--max-tokens", type=_positive, default=128)
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", default=PROMPT)
    prompts.add_argument("--prompt-file", type=Path, help="a prompt in each line, used in turn")
    prompts.add_argument("--prompt-tokens", type=_positive, help="length of a random prompt")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="each request makes a kept session")
    parser.add_argument("--api-key")
    options = parser.parse_args()
    return Load(
        url=options.url,
        num_streams=options.streams,
        num_requests=options.requests,
        streams_per_socket=options.per_socket,
        max_tokens=options.max_tokens,
        prompts=_prompts(options),
        temperature=options.temperature,
        seed=options.seed,
        keep=options.keep,
        api_key=options.api_key,
    )


def _prompts(options: argparse.Namespace) -> Sequence[str | Sequence[int]]:
    if options.prompt_tokens:
        draw = random.Random(options.seed)
        return [draw.choices(range(NUM_SAFE_IDS), k=options.prompt_tokens)]
    if options.prompt_file:
        lines = options.prompt_file.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.strip()] or [PROMPT]
    return [options.prompt]


def main() -> int:
    """The command; 1 where any request failed."""
    load = _arguments()
    try:
        summary, measured = asyncio.run(run(load))
    except (EverstreamError, OSError) as error:
        print(f"load: cannot connect to {load.url}: {error}", file=sys.stderr)
        return 1
    figures = asdict(summary)
    for name, value in figures.items():
        print(f"{name:>14} {'-' if value is None else f'{value:,}':>14}")
    for code, count in Counter(measured.errors).most_common():
        print(f"{code:>14} {count:>14,}")
    print(json.dumps(figures, allow_nan=False))
    return 1 if measured.errors else 0


if __name__ == "__main__":
    sys.exit(main())
