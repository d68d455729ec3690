"""What a store costs for each token and when idle, and what more replicas on a shared one give."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

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
NUM_REPLICAS = 3
NUM_SESSIONS = 4
TURN_TOKENS = 64
#: Until replicas have saved what they were asked for.
SETTLE_S = 3.0


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


def idle(options: argparse.Namespace) -> Figures:
    """Of each replica among three that watch each other."""
    with place() as database, ExitStack() as stack:
        servers = [
            stack.enter_context(ServerProcess("--threads", "1", "--store", database.url))
            for _ in range(NUM_REPLICAS)
        ]
        for server in servers:  # so that each has all the connections that it will have
            state_bytes = _converse(server.url, options.turns)
        time.sleep(SETTLE_S)
        before = database.work()
        time.sleep(options.idle_seconds)
        work = database.work().since(before)
        connections = database.num_connections
        for server in servers:
            server.stop()
        stored_bytes = database.ask(f'SELECT avg(bytes) FROM "{database.schema}".session')
    each_s = options.idle_seconds * NUM_REPLICAS
    return {
        "connections_per_replica": round(connections / NUM_REPLICAS, 2),
        "transactions_per_s_per_replica": round(work.transactions / each_s, 2),
        "database_cpu_per_replica": round(work.cpu_s / each_s, 5),
        "wal_bytes_per_s_per_replica": round(work.wal_bytes / each_s, 1),
        "state_bytes": state_bytes,
        "stored_bytes_per_session": round(stored_bytes),
    }


def _converse(url: str, num_turns: int) -> int:
    """Has some sessions of so many turns written; the bytes of one state."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        for _ in range(NUM_SESSIONS):
            created = client.post("/v1/sessions").raise_for_status().json()
            for turn in range(num_turns):
                body = {"prompt": " And then", "max_tokens": TURN_TOKENS, "ignore_eos": True}
                answer = client.post(
                    "/v1/completions", json={**body, "session": created["session"], "seed": turn}
                )
                answer.raise_for_status()
    return int(created["state_bytes"])
