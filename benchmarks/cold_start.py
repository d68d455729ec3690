"""Seconds from the start of `everstream serve` to the first token over server-sent events.

The bundled model, a process of its own each time; the files are in the system's cache from the
first start on, which is among the figures.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.machine import machine
from benchmarks.process import LOCAL, ROOT, STOP_TIMEOUT_S
from benchmarks.report import print_result, show, table

#: Once in every event of a token.
MARK = b'"position":'
PROMPT = {"prompt": "Once upon a time", "max_tokens": 5, "stream": True}
RECEIVE_BYTES = 1 << 16


def start_once(flags: Sequence[str]) -> tuple[float, float]:
    """Seconds to the printed address, and to the first token."""
    command = [sys.executable, "-m", "server.cli.main", "serve", "--host", LOCAL, "--port", "0"]
    command += ["--store", "memory", *flags]
    start = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        try:
            assert child.stdout is not None
            port = next(
                int(found[1])
                for line in child.stdout
                if (found := re.search(rb"http://\S+?:(\d+)/v1/completions", line))
            )
            listening_s = time.perf_counter() - start
            first_token(port)
            return listening_s, time.perf_counter() - start
        finally:
            child.terminate()
            child.wait(STOP_TIMEOUT_S)


def first_token(port: int) -> None:
    """Asks for a completion and returns when its first token is there."""
    body = json.dumps(PROMPT).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-length: %d\r\n\r\n" % len(body)
    received = b""
    with socket.create_connection((LOCAL, port), timeout=STOP_TIMEOUT_S) as connection:
        connection.sendall(head + body)
        while MARK not in received:
            data = connection.recv(RECEIVE_BYTES)
            if not data:
                raise SystemExit(f"the server answered {received.decode(errors='replace')}")
            received += data


def main() -> None:
    """Measures, prints, and ends with the line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--starts", type=int, default=7)
    options, flags = parser.parse_known_args()
    on = machine()
    times = [start_once(flags) for _ in range(options.starts)]
    medians = [round(statistics.median(column), 3) for column in zip(*times, strict=True)]
    result = table(f"seconds, {options.starts} starts", ("", "median", "slowest"))
    slowest = [round(max(column), 3) for column in zip(*times, strict=True)]
    for name, median, most in zip(("listening", "first token"), medians, slowest, strict=True):
        result.add_row(name, f"{median:.2f}", f"{most:.2f}")
    show(result)
    first_tokens = [round(seconds, 3) for _, seconds in times]
    figures = {"listening_s": medians[0], "first_token_s": medians[1], "starts_s": first_tokens}
    print_result("cold_start", on, figures)


if __name__ == "__main__":
    main()
