"""The tables of docs/scale.md, from the committed results of `benchmarks.cluster`.

``python -m benchmarks.cluster.page`` puts them into the page, each in the place of the one that
is there; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.process import ROOT
from benchmarks.report import RESULTS, Figures, markdown, read_result

RESULT = RESULTS / "cluster.json"
PAGE = ROOT / "docs" / "scale.md"
#: The tables stand between these.
BEGIN, END = "<!-- measured:", "<!-- end of measured -->"

KINDS = {
    "kill": "`kill -9`",
    "drain": "SIGTERM",
    "leave": "its client asks elsewhere, the replica lives",
}
#: Rows of the paper: name, and how a figure is written.
ON_PAPER = {
    "streams": "streams",
    "tokens_per_s": "tokens/s",
    "sessions_in_memory": "sessions in memory",
    "sessions_asleep": "sessions asleep in one database",
    "commits_per_s": "commits/s",
    "wal_mib_per_s": "MiB/s of its log",
    "moves_per_s": "sessions/s that move",
    "connections": "connections",
    "watch_transactions_per_s": "transactions/s that only watch",
}
SHARES = {
    "cores": "CPU",
    "log": "log",
    "notices": "notices, one after another",
    "connections": "connections",
}


def read() -> Figures:
    """The committed results."""
    return read_result(RESULT)


def tables(result: Figures) -> list[str]:
    """All of them, in the order of the page."""
    parts = result["parts"]
    return [
        conditions(result),
        cost(parts["cost"], parts["commits"]),
        takeover(parts["takeover"]),
        parts_of_a_takeover(parts["takeover"]["kill"]),
        replicas(parts["replicas"]),
        given(result["paper"]),
        paper(result["paper"]),
    ]


def conditions(result: Figures) -> str:
    """What was measured on, and what else went on there."""
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


def cost(found: Figures, commits: Figures) -> str:
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
    """A row for each kind and number of streams."""
    rows = [
        [
            KINDS[kind],
            streams,
            f"{own['num']:,}",
            *(f"{own[name] / 1e3:.2f}" for name in ("p50_ms", "p99_ms", "worst_ms")),
        ]
        for kind, by_streams in found.items()
        for streams, own in by_streams.items()
    ]
    return _table(
        ("the replica's end", "streams at once", "waits", "p50 s", "p99 s", "worst s"), rows
    )


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


def paper(found: Figures) -> str:
    """A column for each number of machines."""
    columns = found["machines"]
    rows = [[name, *(_number(one[key]) for one in columns)] for key, name in ON_PAPER.items()]
    rows += [
        [f"part of its {name}", *(f"{one['shares'][key]:.0%}" for one in columns)]
        for key, name in SHARES.items()
    ]
    rows.append(["breaks first", *(SHARES[one["first"]] for one in columns)])
    rows.append(["machines that it bears", *(f"{one['machines_at_most']:,}" for one in columns)])
    return _table(("", *(f"{one['machines']:,} machines" for one in columns)), rows)


def given(found: Figures) -> str:
    """What was measured for the paper, and what it assumes."""
    rows = [
        [name.replace("_", " "), f"{value:,}", word]
        for kind, word in (("inputs", "measured"), ("assumed", "assumed"))
        for name, value in found[kind].items()
    ]
    return _table(("of one replica, and of the database", "", ""), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return markdown(head, rows, align="---")


def _loads(loads: Sequence[float]) -> str:
    return " ".join(f"{one:.1f}" for one in loads)


def _pair(figures: Figures) -> str:
    return f"{figures['p50_ms']:.2f} / {figures['p99_ms']:.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:,.1f}"


def main() -> None:
    """Puts the tables into the page."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    measured, end, after = rest.partition(END)
    own = iter(tables(read()))
    blocks = [next(own) if block.startswith("|") else block for block in measured.split("\n\n")]
    left = list(own)
    assert not left, f"{len(left)} tables have no place on the page"
    PAGE.write_text(before + begin + "\n\n".join(blocks) + end + after, encoding="utf-8")


if __name__ == "__main__":
    main()
