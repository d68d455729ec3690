"""Is a token as cheap at position 100,000 as at 1,000? Time and memory of one session, and peers.

One stream through the engine, greedily. Every position has a session of its own;
they take turns, a block of tokens each, in one process, so that the machine's
noise falls on all alike. Memory is that of the process while one session grows
from the first position to the last. For comparison: softmax models of the same size.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.decode.softmax import Peer, peers
from benchmarks.machine import resident_bytes
from benchmarks.probe import OWNER, Probe
from benchmarks.report import Figures, Result, command_line, show_figures
from benchmarks.studies.pages.speed import flatness_table
from model.state import kv_cache_bytes_per_token
from model.weights import num_parameters
from server.cli.inspect import format_bytes
from server.engine.types import SamplingParams, TokenEvent
from server.models.backend import Backend, open_backend
from server.models.build import load_model

APPEND_TOKENS = 1024
WARM_UP_TOKENS = 4096
SETTLE_TOKENS = 50
PEER_WARM_UP = 3
#: dtype of ours -> of the softmax models it is compared with, which have no int8.
PEER_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "bfloat16"}


@dataclass(frozen=True)
class Row:
    """One model at one position."""

    name: str
    position: int
    ms_per_token: float
    memory_bytes: int


class Stream(Probe):
    """An engine whose sessions are fed and timed one at a time."""

    def feed(self, session: str, position: int) -> None:
        """Appends text until the session is ``position`` tokens long."""
        length = self.engine.kept.info(session, OWNER, now=0.0).position
        while length < position:
            num_tokens = min(APPEND_TOKENS, position - length)
            self.submit(session, self.text(num_tokens))
            self.drain()
            length += num_tokens

    def decode(self, session: str, num_tokens: int) -> list[float]:
        """Milliseconds of each of ``num_tokens`` steps that make one token."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self.submit(session, (), sampling)
        times = []
        for _ in range(num_tokens):
            start = time.perf_counter()
            events = self.engine.step(now=0.0)
            times.append((time.perf_counter() - start) * 1e3)
            assert sum(isinstance(event, TokenEvent) for event in events) == 1, events
        assert not self.engine.has_work()
        return times


def measure(
    backend: Backend, positions: list[int], num_tokens: int, rounds: int
) -> tuple[list[Row], list[int]]:
    """Our rows, and resident bytes as one session passes each of ``positions``."""
    probe = Stream(backend, len(positions))
    first = probe.open()
    probe.feed(first, WARM_UP_TOKENS)
    probe.decode(first, 4 * SETTLE_TOKENS)
    probe.close(first)

    sessions = [probe.open() for _ in positions]
    half = num_tokens // 2
    for session, position in zip(sessions[:-1], positions[:-1], strict=True):
        probe.feed(session, max(1, position - half))
    resident = []
    for position in positions:
        probe.feed(sessions[-1], max(1, position - half - SETTLE_TOKENS))
        probe.decode(sessions[-1], SETTLE_TOKENS)
        gc.collect()
        resident.append(resident_bytes(os.getpid()))

    times = in_turn(probe, sessions, max(1, num_tokens // rounds), rounds)
    rows = [
        Row(backend.config.attention, position, statistics.median(t), probe.state_bytes)
        for position, t in zip(positions, times, strict=True)
    ]
    return rows, resident


def in_turn(probe: Stream, sessions: list[str], num_tokens: int, rounds: int) -> list[list[float]]:
    """Milliseconds of the tokens of each session, in alternating order, so that drift cancels."""
    times: list[list[float]] = [[] for _ in sessions]
    for number in range(rounds):
        order = range(len(sessions)) if number % 2 == 0 else reversed(range(len(sessions)))
        for index in order:
            times[index] += probe.decode(sessions[index], num_tokens)
    return times


def measure_peer(peer: Peer, position: int, num_tokens: int) -> Row:
    """One softmax model with ``position`` tokens in its cache."""
    peer.fill(position, num_tokens + PEER_WARM_UP)
    times = []
    for _ in range(num_tokens + PEER_WARM_UP):
        start = time.perf_counter()
        peer.step()
        times.append((time.perf_counter() - start) * 1e3)
    return Row(peer.name, position, statistics.median(times[PEER_WARM_UP:]), peer.cache_bytes())


def print_memory(positions: list[int], resident: list[int], cache_bytes_per_token: int) -> None:
    """A table of what the process holds while its session grows."""
    rows = {
        f"{position:,}": {
            "resident": format_bytes(size),
            "growth in KiB": (size - resident[0]) // 1024,
            "a KV cache in 16 bits would be": format_bytes(cache_bytes_per_token * position),
        }
        for position, size in zip(positions, resident, strict=True)
    }
    show_figures("one session grows; memory of the whole process", rows)


def figures_of(rows: list[Row]) -> list[Figures]:
    """The rows of one model, for the line of JSON."""
    return [
        {
            "position": row.position,
            "ms_per_token": round(row.ms_per_token, 4),
            "ratio": round(row.ms_per_token / rows[0].ms_per_token, 4),
            "memory_bytes": row.memory_bytes,
        }
        for row in rows
    ]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--model", help="checkpoint folder; default: the bundled model")
    parser.add_argument("--backend", default="auto", choices=("auto", "native", "torch"))
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, int8 or int4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--positions", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--tokens", type=int, default=500, help="tokens timed per position")
    parser.add_argument("--rounds", type=int, default=10, help="turns of the measurement")
    parser.add_argument(
        "--peer-positions", type=int, nargs="*", default=[1_000, 8_000, 32_000, 100_000]
    )
    parser.add_argument("--peer-tokens", type=int, default=30, help="tokens timed per position")
    return parser.parse_args()


def main() -> None:
    """Measures, prints, and ends with the line of JSON."""
    options = arguments()
    result = Result("flatness", options.output)
    positions = sorted(options.positions)
    checkpoint = load_model(options.model)
    backend = open_backend(checkpoint, options.backend, options.dtype, options.threads)
    config, dtype = checkpoint.config, getattr(torch, PEER_DTYPES[backend.dtype])
    parameters = num_parameters(config)

    rows, resident = measure(backend, positions, options.tokens, options.rounds)
    print_memory(positions, resident, kv_cache_bytes_per_token(config))
    groups, sizes = [rows], {config.attention: parameters}
    if options.peer_positions:
        for peer in peers(config, parameters, dtype):
            sizes[peer.name] = peer.num_parameters
            spots = sorted(options.peer_positions)
            groups.append([measure_peer(peer, spot, options.peer_tokens) for spot in spots])
    figures: Figures = {
        "threads": options.threads,
        "dtype": backend.dtype,
        "backend": backend.name,
        "digest": checkpoint.digest,
        "time_ratio": round(rows[-1].ms_per_token / rows[0].ms_per_token, 4),
        "rss_growth_kib": (resident[-1] - resident[0]) // 1024,
        "parameters": sizes,
        "models": {group[0].name: figures_of(group) for group in groups},
    }
    print(flatness_table(figures))
    result.finish(figures)


if __name__ == "__main__":
    main()
