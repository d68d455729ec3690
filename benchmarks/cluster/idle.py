"""What replicas ask of their database when idle, and what the sessions there take."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack

import httpx

from benchmarks.cluster.place import place
from benchmarks.process import ServerProcess
from benchmarks.report import Figures

NUM_REPLICAS = 3
NUM_SESSIONS = 4
TURN_TOKENS = 64
#: Until replicas have saved what they were asked for.
SETTLE_S = 3.0


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
