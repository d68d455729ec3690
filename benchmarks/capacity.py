"""How many sessions a process holds, what each costs, and how long a copy of one takes.

Opens many sessions in one engine, feeds each a short prompt, and reads the resident memory of the
process before and after; then lets some of them generate at once, and then every one of them in
turn. A fork is a copy of a session's block between random slots of the full pool, so that neither
lies in a cache. For comparison, by calculation: a softmax model's KV cache of the same shape in
16 bits, copied at the speed that the blocks were.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.decode.shapes import SIZES
from benchmarks.machine import available_bytes, resident_bytes
from benchmarks.probe import MAX_REQUESTS, Probe
from benchmarks.report import Figures, Result, command_line
from benchmarks.serve.processes import text_checkpoint
from benchmarks.studies.pages.speed import capacity_table
from model.state import StateLayout, kv_cache_bytes_per_token
from server.cli.inspect import format_bytes
from server.engine.types import SamplingParams, TokenEvent
from server.models.backend import Backend, open_backend
from server.models.build import load_model

Item = TypeVar("Item")

#: Above the bytes of the states: what sessions hold in addition, and the model.
SPARE_BYTES = 1 << 30


class Fleet(Probe):
    """An engine full of sessions."""

    def __init__(self, backend: Backend, num_sessions: int) -> None:
        super().__init__(backend, num_sessions)
        self.sessions: list[str] = []

    def fill(self, num_sessions: int, prompt_tokens: int) -> None:
        """Opens sessions and feeds each a prompt, a wave at a time."""
        for wave in _waves(range(num_sessions)):
            opened = [self.open() for _ in wave]
            self.sessions += opened
            for session in opened:
                self.submit(session, self.text(prompt_tokens))
            self.drain()

    def start(self, sessions: Sequence[str], max_tokens: int) -> None:
        """Lets ``sessions`` generate; returns when each has made its first token."""
        for session in sessions:
            self.submit(session, (), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        waiting = len(sessions)
        while waiting > 0:
            waiting -= sum(isinstance(e, TokenEvent) for e in self.engine.step(now=0.0))

    def token_each(self) -> float:
        """Seconds in which every session makes one token."""
        start = time.perf_counter()
        for wave in _waves(self.sessions):
            self.start(wave, max_tokens=1)
            self.drain()
        return time.perf_counter() - start


def _waves(items: Sequence[Item]) -> list[Sequence[Item]]:
    return [items[first : first + MAX_REQUESTS] for first in range(0, len(items), MAX_REQUESTS)]


def measure_sessions(backend: Backend, options: argparse.Namespace) -> Figures:
    """Memory of idle and active sessions, and the time of a token for each of them."""
    needed = options.sessions * StateLayout.of(backend.config).num_bytes + SPARE_BYTES
    if needed > available_bytes():
        raise SystemExit(f"{options.sessions:,} sessions need {format_bytes(needed)} of memory")
    fleet = Fleet(backend, options.sessions)
    fleet.fill(1, options.prompt_tokens)
    empty = _resident()
    fleet.fill(options.sessions - 1, options.prompt_tokens)
    idle = _resident()
    active = min(options.active, options.sessions)
    fleet.start(fleet.sessions[:active], max_tokens=64)
    running = _resident()
    fleet.drain()
    return {
        "sessions": options.sessions,
        "state_bytes": fleet.state_bytes,
        "resident_bytes": {"first": empty, "idle": idle, "active": running},
        "active_sessions": active,
        "idle_bytes_per_session": per_session(empty, idle, options.sessions - 1),
        "extra_bytes_per_active_session": per_session(idle, running, active),
        "token_each_s": round(fleet.token_each(), 4),
    }


def per_session(before: int, after: int, num_sessions: int) -> int:
    """Bytes by which memory grew, for each session."""
    return round((after - before) / max(1, num_sessions))


def _resident() -> int:
    gc.collect()
    return resident_bytes(os.getpid())


def fork_times(pool: NDArray[np.uint8], num_forks: int) -> list[float]:
    """Seconds of copies of one row of ``pool`` [slots, bytes] to another, drawn at random."""
    draw, times = random.Random(0), []
    for _ in range(num_forks):
        source, target = draw.sample(range(len(pool)), 2)
        start = time.perf_counter()
        pool[target] = pool[source]
        times.append(time.perf_counter() - start)
    return times


def measure_forks(state_bytes: int, num_slots: int, num_forks: int) -> Figures:
    """Microseconds of a fork in a pool that is written, and so in memory, before."""
    pool = np.ones((num_slots, state_bytes), np.uint8)
    times = sorted(fork_times(pool, num_forks))
    median_s = statistics.median(times)
    return {
        "forks": num_forks,
        "slots": num_slots,
        "median_us": round(median_s * 1e6, 2),
        "p99_us": round(times[min(len(times) - 1, len(times) * 99 // 100)] * 1e6, 2),
        "bytes_per_s": round(state_bytes / median_s),
    }


def kv_caches(bytes_per_token: int, lengths: Sequence[int], bytes_per_s: float) -> list[Figures]:
    """Bytes of a KV cache at each length, and how long a copy takes at ``bytes_per_s``."""
    return [
        {
            "tokens": length,
            "bytes": bytes_per_token * length,
            "copy_us": round(bytes_per_token * length / bytes_per_s * 1e6, 2),
        }
        for length in lengths
    ]


def arguments(command: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--size", choices=SIZES, default="S1")
    parser.add_argument("--attention", default="gated")
    parser.add_argument("--backend", default="auto", choices=("auto", "native", "torch"))
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, int8 or int4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=10_000, help="sessions, at least 2")
    parser.add_argument(
        "--active", type=int, default=256, help="sessions that generate concurrently"
    )
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--forks", type=int, default=2000)
    parser.add_argument("--fork-slots", type=int, default=512, help="slots of their pool")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--models", type=Path, help="folder to keep the model in between runs")
    parser.add_argument("--quick", action="store_true", help="short run: 300 sessions")
    options = parser.parse_args(command)
    if options.quick:
        options.sessions, options.active, options.forks, options.fork_slots = 300, 32, 200, 64
    if options.sessions < 2 or options.fork_slots < 2:
        parser.error("there must be at least two sessions and two slots")
    return options


def main(command: Sequence[str] | None = None) -> None:
    """Measures, prints, and ends with the line of JSON."""
    options = arguments(command)
    result = Result("capacity", options.output)
    with ExitStack() as stack:
        folder = options.models or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = text_checkpoint(folder, SIZES[options.size], options.attention)
        backend = open_backend(
            load_model(str(path)), options.backend, options.dtype, options.threads
        )
        sessions = measure_sessions(backend, options)
    fork = measure_forks(sessions["state_bytes"], options.fork_slots, options.forks)
    per_token = kv_cache_bytes_per_token(backend.config)
    figures: Figures = {
        "size": options.size,
        "attention": options.attention,
        "backend": backend.name,
        "dtype": backend.dtype,
        "threads": options.threads,
        "sessions": sessions,
        "fork": fork,
        "kv_cache": kv_caches(per_token, options.lengths, fork["bytes_per_s"]),
    }
    print(capacity_table(figures))
    print(f"one token for each session: {sessions['token_each_s']:.2f} s")
    result.finish(figures)


if __name__ == "__main__":
    main()
