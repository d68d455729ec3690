"""Ten machines, and a thousand, on paper: what they ask of one PostgreSQL.

Every input is measured in the same run, or an assumption that the command line names. What is
asked for grows with the machines; what there is does not, so the highest share breaks first.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.report import Figures

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Inputs:
    """What was measured of one replica: rates in a second while ``tokens_per_s`` are generated.

    ``idle_*`` are those of a replica that has nothing to do. ``stored_bytes`` is what a session
    takes in the database that has its newest states there.
    """

    tokens_per_s: float
    streams: int
    commits_per_s: float
    wal_bytes_per_token: float
    database_us_per_token: float
    state_bytes: int
    stored_bytes: float
    notice_p50_ms: float
    connections: float
    idle_transactions_per_s: float
    idle_database_cpu: float


@dataclass(frozen=True)
class Assumptions:
    """What one replica has for states, and what one database can do.

    ``database_cores`` are as fast as those of the machine that was measured. Of the turns of
    ``turn_tokens`` tokens the share ``moved_turns`` begins where the session is not: that is what
    the balancer leaves of them.
    """

    state_memory_gib: float = 16.0
    database_cores: float = 32.0
    database_connections: int = 500
    database_wal_mib_s: float = 500.0
    database_disk_tib: float = 4.0
    turn_tokens: int = 256
    moved_turns: float = 0.1


#: Of PostgreSQL's channels for each move: a question and its answer.
NOTICES_PER_MOVE = 2


#: By resource: what to do when it is the first to break.
REMEDIES = {
    "cores": "several databases, by a hash of the tenant; fewer watchers, where replicas idle",
    "log": "states in object storage, and a longer save interval; then several databases",
    "notices": "requests routed to where their sessions are; then several databases",
    "connections": "a pooler for all but those that listen; then several databases",
}


def model(inputs: Inputs, given: Assumptions, machines: int) -> Figures:
    """What ``machines`` replicas hold and ask for, and the share of each resource that it is."""
    tokens_per_s = inputs.tokens_per_s * machines
    wal_bytes_per_s = tokens_per_s * inputs.wal_bytes_per_token
    busy_cores = tokens_per_s * inputs.database_us_per_token / 1e6
    watching_cores = machines * inputs.idle_database_cpu
    moves_per_s = tokens_per_s / given.turn_tokens * given.moved_turns
    notices_per_s = moves_per_s * NOTICES_PER_MOVE
    connections = machines * inputs.connections
    shares = {
        "cores": (busy_cores + watching_cores) / given.database_cores,
        "log": wal_bytes_per_s / (given.database_wal_mib_s * MIB),
        # A transaction with a notice keeps all others with one out until it is on the disk.
        "notices": notices_per_s * inputs.notice_p50_ms / 1e3,
        "connections": connections / given.database_connections,
    }
    first = max(shares, key=lambda name: shares[name])
    return {
        "machines": machines,
        "streams": inputs.streams * machines,
        "tokens_per_s": round(tokens_per_s),
        "sessions_in_memory": int(machines * given.state_memory_gib * GIB // inputs.state_bytes),
        "sessions_asleep": int(given.database_disk_tib * 1024 * GIB // inputs.stored_bytes),
        "commits_per_s": round(inputs.commits_per_s * machines),
        "wal_mib_per_s": round(wal_bytes_per_s / MIB, 1),
        "watch_transactions_per_s": round(inputs.idle_transactions_per_s * machines),
        "moves_per_s": round(moves_per_s, 1),
        "notices_per_s": round(notices_per_s),
        "connections": round(connections),
        "busy_cores": round(busy_cores, 2),
        "watching_cores": round(watching_cores, 2),
        "shares": {name: round(share, 4) for name, share in shares.items()},
        "first": first,
        "machines_at_most": int(machines / shares[first]),
        "then": REMEDIES[first],
    }


def inputs_of(parts: Figures, streams: int) -> Inputs:
    """The inputs among the parts of a run, at ``streams`` kept streams of one replica."""
    cost, idle = parts["cost"]["shared"][str(streams)], parts["idle"]
    return Inputs(
        tokens_per_s=cost["tokens_per_s"],
        streams=streams,
        commits_per_s=cost["commits_per_s"],
        wal_bytes_per_token=cost["wal_bytes_per_token"],
        database_us_per_token=cost["database_us_per_token"],
        state_bytes=idle["state_bytes"],
        stored_bytes=idle["stored_bytes_per_session"],
        notice_p50_ms=parts["commits"]["notice"]["p50_ms"],
        connections=idle["connections_per_replica"],
        idle_transactions_per_s=idle["transactions_per_s_per_replica"],
        idle_database_cpu=idle["database_cpu_per_replica"],
    )
