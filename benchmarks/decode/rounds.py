"""Contenders that take turns at one point."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.decode.peers import Point, Unavailable
from benchmarks.decode.report import Row, Turns
from benchmarks.decode.roofline import Rates, bandwidth
from benchmarks.decode.worker import Worker


def measure(
    point: Point, workers: Mapping[str, Worker], rates: Rates, num_rounds: int, seconds: float
) -> Row:
    """Opens all, then lets them run in turns, the bandwidth measured before each."""
    row = Row(point)
    for name, worker in workers.items():
        try:
            row.turns[name] = Turns(worker.open(point), rates.of(point.dtype, point.threads))
        except Unavailable as reason:
            row.skipped[name] = str(reason)
    for number in range(num_rounds):
        for name in list(row.turns) if number % 2 == 0 else list(reversed(row.turns)):
            turns = row.turns[name]
            turns.bandwidths.append(bandwidth(turns.opened.cost.num_bytes, point.threads))
            turns.rounds.append(workers[name].run(seconds))
    return row
