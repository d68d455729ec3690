"""What a store costs for each token, and what more replicas on a shared one give."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cluster.load import FLAGS, load
from benchmarks.cluster.place import place
from benchmarks.process import ServerProcess
from benchmarks.report import Figures

#: Throughput with the one by that with the other, in the same round.
RATIOS = (("shared", "embedded"), ("shared", "memory"), ("embedded", "memory"))
OF_THE_DATABASE = (
    "database_us_per_token",
    "commits_per_s",
    "tokens_per_commit",
    "wal_bytes_per_token",
)


def cost(folder: Path, options: argparse.Namespace) -> Figures:
    """One replica on each kind of store, with so many kept streams; they take turns."""
    with place() as database, ExitStack() as stack:
        stores = {"memory": "memory", "embedded": str(folder / "store"), "shared": database.url}
        servers = {
            way: stack.enter_context(ServerProcess(*FLAGS, "--store", store))
            for way, store in stores.items()
        }
        runs: dict[str, dict[int, list[Figures]]] = {
            way: {num: [] for num in options.streams} for way in servers
        }
        for seed in range(1, options.rounds + 1):
            for num in options.streams:
                for way, server in servers.items():
                    found = load([server], database, num, seed, options)
                    runs[way][num].append(found if way == "shared" else _without_database(found))
    result = {way: {str(num): medians(own) for num, own in of.items()} for way, of in runs.items()}
    for one, other in RATIOS:
        result[f"{one} / {other}"] = {
            str(num): ratio(runs[one][num], runs[other][num]) for num in options.streams
        }
    return result


def replicas(options: argparse.Namespace) -> Figures:
    """The same number of streams on one replica, and spread over more of them."""
    with place() as database, ExitStack() as stack:
        servers = [
            stack.enter_context(ServerProcess(*FLAGS, "--store", database.url))
            for _ in range(max(options.replicas))
        ]
        runs: dict[int, list[Figures]] = {num: [] for num in options.replicas}
        for seed in range(1, options.rounds + 1):
            for num, own in runs.items():
                own.append(load(servers[:num], database, options.replica_streams, seed, options))
    return {str(num): medians(own) for num, own in runs.items()}


def ratio(ours: Sequence[Figures], theirs: Sequence[Figures]) -> Figures:
    """Of throughput, and of all CPU time for a token, the database's included."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "tokens_per_s": _median([a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs]),
        "cpu_per_token": _median([_cpu(a) / _cpu(b) for a, b in pairs]),
    }


def medians(runs: Sequence[Figures]) -> Figures:
    """Of each figure, and the rounds themselves."""
    found = {name: [run[name] for run in runs if run[name] is not None] for name in runs[0]}
    return {**{name: _median(own) for name, own in found.items() if own}, "rounds": list(runs)}


def _without_database(found: Figures) -> Figures:
    return {name: value for name, value in found.items() if name not in OF_THE_DATABASE}


def _cpu(found: Figures) -> float:
    return float(found["server_us_per_token"] + found.get("database_us_per_token", 0.0))


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)
