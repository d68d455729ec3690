"""A load generator for completions as server-sent events, of any server that speaks OpenAI's API.

One thread on raw sockets and epoll looks for the few bytes that it needs instead of parsing JSON,
so that it is not what is measured; its own CPU time is among the figures. Each stream runs its
requests one after another, over a connection for each, as not every server keeps one. Tokens are
those that were asked for: a request that does not end for its length is a failure. Run as
``python -m benchmarks.serve.load --url URL``.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import select
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks.report import Figures
from benchmarks.wire import post

EVENT, DONE, END = b"data: {", b"data: [DONE]", b"0\r\n\r\n"
BY_LENGTH = (b'"finish_reason":"length"', b'"finish_reason": "length"')
RECEIVE_BYTES = 1 << 16
#: What is looked for is shorter, with what may stand between `DONE` and `END`.
TAIL_BYTES = 64
STALL_S = 60.0
#: Ids that exist in every vocabulary that is measured, and are no special tokens.
PROMPT_IDS = range(300, 500)

#: What all servers are told, so that they draw alike; llama.cpp would do more by itself.
SAMPLING: Figures = {"temperature": 1.0, "top_k": 40, "ignore_eos": True, "stream": True}
LLAMA_SAMPLING: Figures = {
    "top_p": 1.0,
    "min_p": 0.0,
    "samplers": ["top_k", "temperature"],
    "cache_prompt": False,
}
DIALECTS: dict[str, Figures] = {"openai": SAMPLING, "llama": {**SAMPLING, **LLAMA_SAMPLING}}


class LoadError(RuntimeError):
    """A server that did not answer as it should."""


@dataclass(frozen=True)
class Load:
    """What to send: ``num_requests`` of each stream, with a random prompt each."""

    url: str
    num_streams: int = 8
    num_requests: int = 4
    max_tokens: int = 128
    prompt_tokens: int = 16
    dialect: str = "openai"
    seed: int = 0


@dataclass
class Stream:
    """The requests that are left, and when the current answer last had something to read."""

    requests: list[bytes]
    connection: socket.socket | None = None
    last_s: float = 0.0
    first_s: float | None = None
    tail: bytes = b""
    by_length: bool = False


@dataclass
class Timings:
    """Seconds: to the first event, between two arrivals, and for a token on average."""

    ttft_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)


def run(load: Load) -> Figures:
    """Sends all and returns the figures; raises `LoadError` or OSError."""
    streams = [Stream(requests_of(load, index)) for index in range(load.num_streams)]
    timings = Timings()
    used, started = _cpu_seconds(), time.perf_counter()
    try:
        with select.epoll() as poll:
            _drive(streams, poll, load, timings)
    finally:
        for stream in streams:
            if stream.connection is not None:
                stream.connection.close()
    seconds = time.perf_counter() - started
    return summarize(load, timings, seconds, _cpu_seconds() - used)


def _drive(streams: list[Stream], poll: select.epoll, load: Load, timings: Timings) -> None:
    """Begins a request of each stream, and the next one when that is answered."""
    address = (urlsplit(load.url).hostname or "", urlsplit(load.url).port or 80)
    waiting: dict[int, Stream] = {}

    def begin(stream: Stream) -> None:
        descriptor = _send(stream, address)
        waiting[descriptor] = stream
        poll.register(descriptor, select.EPOLLIN)

    for stream in streams:
        begin(stream)
    while waiting:
        ready = poll.poll(STALL_S)
        if not ready:
            raise LoadError(f"nothing came for {STALL_S:g} s")
        for descriptor, _ in ready:
            if _receive(waiting[descriptor], load, timings):
                stream = waiting.pop(descriptor)
                poll.unregister(descriptor)
                if stream.requests:
                    begin(stream)


def requests_of(load: Load, stream: int) -> list[bytes]:
    """The requests of one stream, the last one first."""
    draw = random.Random(load.seed * 100_003 + stream)
    result = []
    for number in range(load.num_requests):
        body = json.dumps(
            {
                "prompt": draw.choices(PROMPT_IDS, k=load.prompt_tokens),
                "max_tokens": load.max_tokens,
                "seed": load.seed + stream * load.num_requests + number,
                **DIALECTS[load.dialect],
            }
        ).encode()
        result.append(post("/v1/completions", body))
    return result[::-1]


def _send(stream: Stream, address: tuple[str, int]) -> int:
    """Sends the next request over a new connection, whose descriptor is returned."""
    if stream.connection is not None:
        stream.connection.close()
    stream.first_s, stream.tail, stream.by_length = None, b"", False
    stream.last_s = time.perf_counter()
    stream.connection = socket.create_connection(address)
    stream.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.connection.sendall(stream.requests.pop())
    return stream.connection.fileno()


def _receive(stream: Stream, load: Load, timings: Timings) -> bool:
    """Takes what has come; True where it ends the answer."""
    assert stream.connection is not None
    data, now = stream.connection.recv(RECEIVE_BYTES), time.perf_counter()
    if not data:
        raise LoadError(f"the server closed the connection after {stream.tail!r}")
    seen = stream.tail + data
    if EVENT in seen:
        times = timings.ttft_s if stream.first_s is None else timings.gap_s
        times.append(now - stream.last_s)
        stream.first_s, stream.last_s = stream.first_s or now, now
    stream.by_length = stream.by_length or any(words in seen for words in BY_LENGTH)
    # An event that came in two parts is counted with the second one.
    stream.tail = seen[-TAIL_BYTES:].rpartition(EVENT)[2]
    if not (DONE in seen and seen.endswith(END)):
        return False
    if not stream.by_length or stream.first_s is None:
        raise LoadError(f"an answer did not end for its length: {stream.tail!r}")
    if load.max_tokens > 1:
        timings.tpot_s.append((stream.last_s - stream.first_s) / (load.max_tokens - 1))
    return True


def summarize(load: Load, timings: Timings, seconds: float, cpu_s: float) -> Figures:
    """The figures of a run that took ``seconds``, and ``cpu_s`` of this process."""
    tokens = load.num_streams * load.num_requests * load.max_tokens
    return {
        "streams": load.num_streams,
        "tokens": tokens,
        "seconds": round(seconds, 6),
        "tokens_per_s": round(tokens / seconds, 1),
        "ttft_p50_ms": percentile_ms(timings.ttft_s, 50),
        "ttft_p99_ms": percentile_ms(timings.ttft_s, 99),
        "itl_p50_ms": percentile_ms(timings.gap_s, 50),
        "itl_p99_ms": percentile_ms(timings.gap_s, 99),
        "tpot_p50_ms": percentile_ms(timings.tpot_s, 50),
        "load_cpu_s": round(cpu_s, 6),
    }


def percentile_ms(times_s: Sequence[float], percent: int) -> float | None:
    """The percentile of ``times_s``, None of nothing."""
    if len(times_s) < 2:
        return round(times_s[0] * 1e3, 3) if times_s else None
    cuts = statistics.quantiles(times_s, n=100, method="inclusive")
    return round(cuts[percent - 1] * 1e3, 3)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Runs one load and prints its figures as a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--dialect", choices=DIALECTS, default="openai")
    for name in ("streams", "requests"):
        parser.add_argument(f"--{name}", dest=f"num_{name}", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(run(Load(**vars(parser.parse_args())))))


if __name__ == "__main__":
    main()
