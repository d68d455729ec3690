"""CPU time of each token, and the time to the first, of the server around a model without cost.

64 streams over server-sent events, OpenAI's chats, as many WebSockets, and one socket;
paced as by a model, and unpaced. The client only counts, in a process of its own.
Then the time to the first token of one request at a time. Reads Linux's `/proc`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.machine import thread_seconds
from benchmarks.process import ServerProcess, exit_on_sigterm
from benchmarks.report import Figures, Result, command_line
from benchmarks.server_cost.first_token import first_tokens
from benchmarks.studies.pages.speed import first_token_table, server_cost_table
from benchmarks.websocket import TEXT, frame, handshake
from benchmarks.wire import Counter, Opening, connect, post
from tests.fakes import MODEL

WARM_UP_S = 1.0
MAX_TOKENS = 1_000_000
FIRST_MAX_TOKENS = 2
STANDIN = "benchmarks.server_cost.standin"


def sse_openings(streams: int, max_tokens: int = MAX_TOKENS) -> list[Opening]:
    """A completion on each connection."""
    body = {"prompt": "hi", "max_tokens": max_tokens, "stream": True}
    return [Opening(post("/v1/completions", json.dumps(body).encode()))] * streams


def chat_openings(streams: int, max_tokens: int = MAX_TOKENS) -> list[Opening]:
    """A chat on each connection, as OpenAI's clients ask for it."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": MODEL.name, "messages": messages, "max_tokens": max_tokens, "stream": True}
    head = post("/v1/chat/completions", json.dumps(body).encode())
    return [Opening(head, mark=b'"delta":{"content":')] * streams


def socket_openings(streams: int, max_tokens: int = MAX_TOKENS) -> list[Opening]:
    """A socket for each request."""
    return [Opening(handshake(), _generate("r0", max_tokens))] * streams


def shared_socket_openings(streams: int, max_tokens: int = MAX_TOKENS) -> list[Opening]:
    """One socket for all requests."""
    frames = b"".join(_generate(f"r{number}", max_tokens) for number in range(streams))
    return [Opening(handshake(), frames)]


def _generate(request_id: str, max_tokens: int) -> bytes:
    message = {"type": "generate", "request_id": request_id, "prompt": "hi"}
    return frame(TEXT, json.dumps({**message, "max_tokens": max_tokens}).encode())


WAYS: dict[str, Callable[..., list[Opening]]] = {
    "SSE": sse_openings,
    "OpenAI chat": chat_openings,
    "WebSocket each": socket_openings,
    "one WebSocket": shared_socket_openings,
}


class Sample(NamedTuple):
    """Running totals: CPU seconds of the server by thread, and what the client has counted."""

    loop_s: float
    engine_s: float
    tokens: int
    reads: int
    num_bytes: int


def sample(pid: int, counters: list[Counter]) -> Sample:
    """The totals now; the event loop is the server's main thread."""
    seconds = thread_seconds(pid)
    return Sample(
        seconds.pop(pid),
        sum(seconds.values()),
        sum(counter.num_tokens for counter in counters),
        sum(counter.num_reads for counter in counters),
        sum(counter.num_bytes for counter in counters),
    )


async def measure(server: ServerProcess, openings: list[Opening], seconds: float) -> Figures:
    """One load for ``seconds`` after a warm-up. Raises where a stream ends."""
    counters = [Counter(opening) for opening in openings]
    for counter in counters:
        await connect(counter, server.port)
    await asyncio.sleep(WARM_UP_S)
    before = sample(server.pid, counters)
    await asyncio.sleep(seconds)
    after = sample(server.pid, counters)
    if any(counter.ended for counter in counters):
        raise SystemExit("a stream has ended")
    for counter in counters:
        counter.abort()
    return figures(before, after, seconds)


def figures(before: Sample, after: Sample, seconds: float) -> Figures:
    """What happened between two samples."""
    loop_s, engine_s, tokens, reads, num_bytes = (b - a for a, b in zip(before, after, strict=True))
    return {
        "us_per_token": 1e6 * (loop_s + engine_s) / tokens,
        "loop_us_per_token": 1e6 * loop_s / tokens,
        "engine_us_per_token": 1e6 * engine_s / tokens,
        "tokens_per_s": tokens / seconds,
        "tokens_per_read": tokens / reads,
        "bytes_per_token": num_bytes / tokens,
    }


def run(way: str, pace: float, options: argparse.Namespace) -> Figures:
    """The medians of the rounds, each on a server of its own."""
    rounds = []
    for _ in range(options.rounds):
        with ServerProcess("--steps-per-s", str(pace), module=STANDIN) as server:
            openings = WAYS[way](options.streams)
            rounds.append(asyncio.run(measure(server, openings, options.seconds)))
    names = rounds[0]
    return {name: round(statistics.median(one[name] for one in rounds), 2) for name in names}


def run_first_tokens(way: str, options: argparse.Namespace) -> Figures:
    """One request after the other, on a server that does nothing else."""
    with ServerProcess(module=STANDIN) as server:
        (opening,) = WAYS[way](1, FIRST_MAX_TOKENS)
        return asyncio.run(first_tokens(server.port, opening, options.first_tokens))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument(
        "--pace",
        type=float,
        nargs="+",
        default=[100.0, 0.0],
        help="tokens/s of each stream; 0 is no limit",
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--first-tokens", type=int, default=300, help="requests for the first token"
    )
    return parser.parse_args()


def main() -> None:
    """Measures, prints, and ends with the line of JSON."""
    exit_on_sigterm()
    options = arguments()
    result = Result("server_cost", options.output)
    rows = {(way, pace): run(way, pace, options) for pace in options.pace for way in options.ways}
    cases = [{"way": way, "pace": pace, **row} for (way, pace), row in rows.items()]
    firsts = {way: run_first_tokens(way, options) for way in options.ways}
    figures: Figures = {"cases": cases, "first_token": firsts}
    print(server_cost_table(figures))
    print(first_token_table(figures))
    settings = {"streams": options.streams, "seconds": options.seconds, "rounds": options.rounds}
    result.finish({**settings, "first_tokens": options.first_tokens, **figures})


if __name__ == "__main__":
    main()
