"""Tables of replicas.md and measurements.md, of `benchmarks.cluster` and `store_latency`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.report import RESULTS, Figures, markdown, read_result

RESULT = RESULTS / "cluster.json"
MIB, GIB = 1 << 20, 1 << 30
MACHINES = (10, 1000)

KINDS = {
    "kill": "`kill -9`",
    "drain": "SIGTERM",
    "leave": "its client asks elsewhere, the replica lives",
}
#: Calls of the store, by what `benchmarks.store_latency` calls them.
CALLS = {
    "token": "a token of each",
    "begin": "a request with a key begins in each",
    "finish": "the request of each ends",
    "open": "they are created",
    "maintain": "maintenance, once a second",
    "load": "one of them is loaded",
    "move": "one of them is released",
    "join": "a replica joins",
}
#: What one replica has for states, and what one database can do. Of the turns of ``turn_tokens``
#: tokens the share ``moved_turns`` begins where the session is not, as the balancer leaves it.
ASSUMED: Figures = {
    "state_memory_gib": 16.0,
    "database_cores": 32.0,
    "database_connections": 500,
    "database_wal_mib_s": 500.0,
    "database_disk_tib": 4.0,
    "turn_tokens": 256,
    "moved_turns": 0.1,
}
#: Of PostgreSQL's channels for each move: a question and its answer.
NOTICES_PER_MOVE = 2


def tables() -> dict[str, str]:
    """Those of docs/background/replicas.md."""
    parts = read_result(RESULT)["parts"]
    return {
        "latency": latency_table(read_result(RESULTS / "store_latency.json")),
        "cost": cost(parts["cost"]),
        "take-over": takeover(parts["takeover"]),
    }


def full_tables() -> dict[str, str]:
    """Those of docs/contribute/measurements.md."""
    result = read_result(RESULT)
    parts = result["parts"]
    measured = inputs_of(parts)
    return {
        "cluster conditions": conditions(result),
        "cost": full_cost(parts["cost"], parts["commits"]),
        "parts of a take-over": parts_of_a_takeover(parts["takeover"]["kill"]),
        "replicas": replicas(parts["replicas"]),
        "estimate": estimate_table(measured),
    }


def latency_table(found: Figures) -> str:
    """A row for each call, a column for each round trip: median and longest, in milliseconds."""
    rows, round_trips = [], [name for name in found if name.isdigit()]
    for name, words in CALLS.items():
        own = [found[ms][name] for ms in round_trips]
        rows.append([words, *(f"{at['median_ms']:.0f} / {at['max_ms']:.0f}" for at in own)])
    return _table(["16 sessions", *(f"{ms} ms" for ms in round_trips)], rows)


def conditions(result: Figures) -> str:
    """What was measured on, and its load."""
    on, settings = result["machine"], result["settings"]
    row = [
        f"{on['cpu']}, {on['cores']} cores",
        _loads(on["load_at_start"]),
        _loads(result["load_at_end"]),
        f"{settings['save_interval']:,}",
        f"{settings['rounds']} of {settings['seconds']:g} s",
    ]
    head = ("machine", "its load before", "and after", "tokens between two saved states")
    return _table((*head, "loads of each kind"), [row])


def cost(found: Figures) -> str:
    """In short: a row for each number of streams."""
    names = ("database_us_per_token", "wal_bytes_per_token")
    rows = [
        [
            streams,
            *(f"{found[way][streams]['tokens_per_s']:,.0f}" for way in ("embedded", "shared")),
            *(f"{shared[name]:,.0f}" for name in names),
        ]
        for streams, shared in found["shared"].items()
    ]
    head = ("streams", "folder, tokens/s", "PostgreSQL, tokens/s", "PostgreSQL's CPU, us/token")
    return _table((*head, "log, bytes/token"), rows)


def full_cost(found: Figures, commits: Figures) -> str:
    """A row for each number of streams."""
    head = [
        *("streams", "memory", "embedded", "shared", "shared / embedded, by round"),
        *("CPU of the same", "server, us/token", "PostgreSQL, us/token"),
        *("commits/s", "log, bytes/token", "a commit alone, p50 / p99 ms", "embedded"),
    ]
    rows = []
    for streams, shared in found["shared"].items():
        ratio = found["shared / embedded"][streams]
        speeds = [found[way][streams]["tokens_per_s"] for way in ("memory", "embedded", "shared")]
        rows.append(
            [
                streams,
                *(f"{speed:,.0f}" for speed in speeds),
                f"{ratio['tokens_per_s']:.2f}",
                f"{ratio['cpu_per_token']:.2f}",
                f"{shared['server_us_per_token']:,.0f}",
                f"{shared['database_us_per_token']:,.0f}",
                f"{shared['commits_per_s']:,.0f}",
                f"{shared['wal_bytes_per_token']:,.0f}",
                *(_pair(commits[way][streams]) for way in ("shared", "embedded")),
            ]
        )
    return _table(head, rows)


def takeover(found: Figures) -> str:
    """A row for each kind, a column for each number of streams: p50, p99 and worst, in seconds."""
    rows = [
        [
            KINDS[kind],
            *(
                " / ".join(f"{own[name] / 1e3:.2f}" for name in ("p50_ms", "p99_ms", "worst_ms"))
                for own in by_streams.values()
            ),
        ]
        for kind, by_streams in found.items()
    ]
    counts = [f"{streams} at once" for streams in next(iter(found.values()))]
    return _table(("the replica's end", *counts), rows)


def parts_of_a_takeover(kills: Figures) -> str:
    """Medians of what a wait after a kill consists of."""
    rows = [
        [streams, *(f"{value:,.0f}" for value in own["parts_p50_ms"].values())]
        for streams, own in kills.items()
    ]
    head = ("streams at once", "its lock is free", "others call it dead", "its log is theirs")
    return _table((*head, "the client has `resumed`", "first new token"), rows)


def replicas(found: Figures) -> str:
    """A row for each number of replicas."""
    names = ("tokens_per_s", "server_us_per_token", "database_us_per_token", "commits_per_s")
    rows = [[num, *(f"{own[name]:,.0f}" for name in names)] for num, own in found.items()]
    return _table(
        ("replicas", "tokens/s", "servers, us/token", "PostgreSQL, us/token", "commits/s"), rows
    )


def inputs_of(parts: Figures) -> Figures:
    """What was measured of one replica at its most streams, and of an idle one."""
    streams = max(map(int, parts["cost"]["shared"]))
    cost, idle = parts["cost"]["shared"][str(streams)], parts["idle"]
    return {
        "tokens_per_s": cost["tokens_per_s"],
        "streams": streams,
        "commits_per_s": cost["commits_per_s"],
        "wal_bytes_per_token": cost["wal_bytes_per_token"],
        "database_us_per_token": cost["database_us_per_token"],
        "state_bytes": idle["state_bytes"],
        "stored_bytes": idle["stored_bytes_per_session"],
        "notice_p50_ms": parts["commits"]["notice"]["p50_ms"],
        "connections": idle["connections_per_replica"],
        "idle_transactions_per_s": idle["transactions_per_s_per_replica"],
        "idle_database_cpu": idle["database_cpu_per_replica"],
    }


def estimate_table(measured: Figures) -> str:
    """A column for each number of machines."""
    columns = [estimate({**measured, **ASSUMED}, machines) for machines in MACHINES]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return _table(("", *(f"{machines:,} machines" for machines in MACHINES)), rows)


def estimate(of: Figures, machines: int) -> dict[str, str]:
    """What ``machines`` replicas hold and need of one database, and the share of each resource.

    What is asked for grows with the machines, and what there is does not: the highest share
    breaks first.
    """
    tokens_per_s = of["tokens_per_s"] * machines
    log_mib_per_s = tokens_per_s * of["wal_bytes_per_token"] / MIB
    moves_per_s = tokens_per_s / of["turn_tokens"] * of["moved_turns"]
    busy_cores = tokens_per_s * of["database_us_per_token"] / 1e6
    shares = {
        "CPU": (busy_cores + machines * of["idle_database_cpu"]) / of["database_cores"],
        "log": log_mib_per_s / of["database_wal_mib_s"],
        # A transaction with a notice keeps all others with one out until it is on the disk.
        "notices, one after another": moves_per_s * NOTICES_PER_MOVE * of["notice_p50_ms"] / 1e3,
        "connections": machines * of["connections"] / of["database_connections"],
    }
    first = max(shares, key=lambda name: shares[name])
    disk_bytes = of["database_disk_tib"] * 1024 * GIB
    amounts = {
        "streams": of["streams"] * machines,
        "tokens/s": tokens_per_s,
        "sessions in memory": machines * of["state_memory_gib"] * GIB // of["state_bytes"],
        "stored sessions of one database": disk_bytes // of["stored_bytes"],
        "commits/s": of["commits_per_s"] * machines,
        "MiB/s of its log": log_mib_per_s,
        "sessions/s that move": moves_per_s,
        "connections": machines * of["connections"],
        "transactions/s that only watch": of["idle_transactions_per_s"] * machines,
    }
    return {
        **{name: _number(value) for name, value in amounts.items()},
        **{f"part of its {name}": f"{share:.0%}" for name, share in shares.items()},
        "breaks first": first,
        "machines that it can serve": f"{int(machines / shares[first]):,}",
    }


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return markdown(head, rows, align="---")


def _loads(loads: Sequence[float]) -> str:
    return " ".join(f"{one:.1f}" for one in loads)


def _pair(figures: Figures) -> str:
    return f"{figures['p50_ms']:.2f} / {figures['p99_ms']:.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:,.1f}"
