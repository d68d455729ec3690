"""Seconds from the start of `everstream serve` to the first token over server-sent events.

The bundled model, a process of its own each time; the files are in the system's cache from the
first start on, which is among the figures.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Sequence

from benchmarks.process import LOCAL, STOP_TIMEOUT_S, ServerProcess
from benchmarks.report import Result, command_line, show_figures
from benchmarks.wire import TOKEN_MARK, post

PROMPT = {"prompt": "Once upon a time", "max_tokens": 5, "stream": True}
RECEIVE_BYTES = 1 << 16


def start_once(flags: Sequence[str]) -> tuple[float, float]:
    """Seconds until the server is ready, and to the first token."""
    start = time.perf_counter()
    with ServerProcess(*flags) as server:
        ready_s = time.perf_counter() - start
        first_token(server.port)
        return ready_s, time.perf_counter() - start


def first_token(port: int) -> None:
    """Asks for a completion and returns when its first token is there."""
    body = json.dumps(PROMPT).encode()
    received = b""
    with socket.create_connection((LOCAL, port), timeout=STOP_TIMEOUT_S) as connection:
        connection.sendall(post("/v1/completions", body))
        while TOKEN_MARK not in received:
            data = connection.recv(RECEIVE_BYTES)
            if not data:
                raise SystemExit(f"the server answered {received.decode(errors='replace')}")
            received += data


def main() -> None:
    """Measures, prints, and ends with the line of JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--starts", type=int, default=7)
    options, flags = parser.parse_known_args()
    result = Result("cold_start", options.output)
    times = [start_once(flags) for _ in range(options.starts)]
    figures = {
        name: {"median_s": statistics.median(column), "slowest_s": max(column)}
        for name, column in zip(("ready", "first token"), zip(*times, strict=True), strict=True)
    }
    show_figures(f"{options.starts} starts", figures)
    result.finish({**figures, "starts_s": [round(seconds, 3) for _, seconds in times]})


if __name__ == "__main__":
    main()
