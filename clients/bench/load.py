"""One level of load: a number of concurrent streams, or requests at random times.

Latencies are measured when a frame arrives: TTFT from the time at which a request is
due to its first token, inter-token latency from one token's frame to the next. They
include the delay of a request that is due while the load generator is busy.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from clients.python.errors import EverstreamError
from clients.python.protocol import Protocol, handshake_error

PROMPT = "Once upon a time there was a little girl who lived in a house by the sea"


@dataclass(frozen=True)
class Load:
    """What to send: ``num_streams`` streams of ``num_requests`` each, one after another.

    With a ``rate``, ``num_requests`` requests in total arrive as a Poisson process of
    that many per second, distributed over ``num_streams`` sockets. Request number n
    has the seed ``seed + n`` and the prompt ``prompts[n % len(prompts)]``; requests
    are numbered by stream, or by time. With ``keep`` each has its own kept session.
    """

    url: str
    num_streams: int = 8
    num_requests: int = 4
    rate: float | None = None
    streams_per_socket: int = 1
    max_tokens: int = 128
    prompts: Sequence[str | Sequence[int]] = (PROMPT,)
    temperature: float | None = None
    seed: int = 0
    keep: bool = False
    api_key: str | None = None

    def request(self, number: int) -> dict[str, Any]:
        """The fields of a request."""
        given = {} if self.temperature is None else {"temperature": self.temperature}
        return given | {
            "prompt": self.prompts[number % len(self.prompts)],
            "max_tokens": self.max_tokens,
            "seed": self.seed + number,
            "ignore_eos": True,
            "keep": self.keep,
        }

    def arrivals(self) -> Iterator[float]:
        """When each request of a ``rate`` is due, in seconds from the start."""
        assert self.rate is not None
        draw = random.Random(self.seed)
        gaps = (draw.expovariate(self.rate) for _ in range(self.num_requests))
        return itertools.accumulate(gaps)


@dataclass(slots=True)
class Timed:
    """A request's times, in seconds; ``error`` is the code of its failure."""

    due_s: float
    last_s: float = 0.0
    ttft_s: float | None = None
    inter_token_s: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.inter_token_s) + (self.ttft_s is not None)

    @property
    def latency_s(self) -> float:
        """Time from when the request was due to its last token."""
        return self.last_s - self.due_s

    def count_token(self, now_s: float) -> None:
        """Records a token's frame that arrived at ``now_s``."""
        if self.ttft_s is None:
            self.ttft_s = now_s - self.due_s
        else:
            self.inter_token_s.append(now_s - self.last_s)
        self.last_s = now_s


async def run(load: Load) -> tuple[list[Timed], float]:
    """Runs all requests; returns them, and the seconds from when all sockets are connected.

    Raises `EverstreamError` or OSError if a socket cannot be opened; later failures
    are recorded in the requests.
    """
    protocol = Protocol(load.url, load.api_key)
    num_sockets = -(-load.num_streams // load.streams_per_socket)
    connections = await _connect(protocol, num_sockets)
    lines = [_Line(connection, protocol) for connection in connections]
    started_s = time.perf_counter()
    if load.rate is None:
        timed = await _run_streams(load, lines)
    else:
        timed = await _run_arrivals(load, lines)
    seconds = time.perf_counter() - started_s
    await asyncio.gather(*(line.close() for line in lines))
    return timed, seconds


async def _run_streams(load: Load, lines: list[_Line]) -> list[Timed]:
    async def stream(index: int) -> list[Timed]:
        line, first = lines[index // load.streams_per_socket], index * load.num_requests
        numbers = range(first, first + load.num_requests)
        return [await line.request(load.request(n), time.perf_counter()) for n in numbers]

    streams = await asyncio.gather(*map(stream, range(load.num_streams)))
    return [timed for of_stream in streams for timed in of_stream]


async def _run_arrivals(load: Load, lines: list[_Line]) -> list[Timed]:
    begin_s = time.perf_counter()
    tasks = []
    for number, arrival_s in enumerate(load.arrivals()):
        due_s = begin_s + arrival_s
        await asyncio.sleep(due_s - time.perf_counter())
        request = lines[number % len(lines)].request(load.request(number), due_s)
        tasks.append(asyncio.create_task(request))
    return await asyncio.gather(*tasks)


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


class _Line:
    """A socket and its requests. One task reads, and wakes a request's task only at its end."""

    def __init__(self, connection: ClientConnection, protocol: Protocol) -> None:
        self._connection, self._protocol = connection, protocol
        self._running: dict[str, tuple[Timed, asyncio.Future[None]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def request(self, fields: dict[str, Any], due_s: float) -> Timed:
        """Runs a request until it ends."""
        timed = Timed(due_s, due_s)
        if self._reader.done():
            timed.error = "connection_lost"
            return timed
        request_id, message = self._protocol.message("generate", **fields)
        ended = asyncio.get_running_loop().create_future()
        self._running[request_id] = timed, ended
        try:
            await self._connection.send(message, text=True)
        except ConnectionClosed:
            timed.error = "connection_lost"
        else:
            await ended
        return timed

    async def close(self) -> None:
        await self._connection.close()
        await self._reader

    async def _read(self) -> None:
        running = self._running
        try:
            while True:
                event = orjson.loads(await self._connection.recv(decode=False))
                if event["type"] == "token":
                    running[event["request_id"]][0].count_token(time.perf_counter())
                elif event["type"] != "started":
                    timed, ended = running.pop(event["request_id"])
                    timed.error = _failure(event)
                    ended.set_result(None)
        except ConnectionClosed:
            for timed, ended in running.values():
                timed.error = "connection_lost"
                if not ended.done():
                    ended.set_result(None)


def _failure(event: dict[str, Any]) -> str | None:
    """The code of a request's failure, or None for a regular end."""
    if event["type"] == "error":
        return str(event["error"]["code"])
    return None if event["finish_reason"] in ("length", "stop") else str(event["finish_reason"])


def unreachable(error: EverstreamError | OSError, url: str) -> str:
    """The error message for a failed connection."""
    return f"cannot connect to {url}: {error}"
