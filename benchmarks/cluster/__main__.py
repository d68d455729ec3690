"""Many replicas on one store: what it costs for each token, and how soon another one continues.

Real `everstream serve` processes of one thread, and a PostgreSQL that syncs every commit, next to
the load generator on one machine: they share its cores, so CPU time is told apart by process.
Ways and numbers take turns for several rounds; figures are medians, ratios those within a round.
Each part can be run by itself (``--part takeover``); the last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.cluster import commits as store_commits
from benchmarks.cluster import cost, takeover
from benchmarks.cluster.place import place
from benchmarks.cluster.takeover import KINDS
from benchmarks.machine import machine
from benchmarks.process import exit_on_sigterm
from benchmarks.report import Figures, Result, command_line, show_figures
from server.config import PREFIX, SHARED_SAVE_INTERVAL

QUICK: Figures = {
    "streams": [1, 2],
    "seconds": 1.5,
    "rounds": 1,
    "replicas": [1, 2],
    "replica_streams": 2,
    "kinds": list(KINDS),
    "takeover_streams": [1, 2],
    "takeovers": [2, 1],
    "save_interval": 40,
    "commits": 20,
    "idle_seconds": 1.5,
    "turns": 2,
}


def commits(folder: Path, options: argparse.Namespace) -> Figures:
    """See `benchmarks.cluster.commits`."""
    with place() as database:
        return store_commits.measure(
            database.url, folder / "store", options.streams, options.commits
        )


PARTS: dict[str, Callable[[Path, argparse.Namespace], Figures]] = {
    "cost": cost.cost,
    "commits": commits,
    "takeover": lambda folder, options: takeover.measure(options),
    "replicas": lambda folder, options: cost.replicas(options),
    "idle": lambda folder, options: cost.idle(options),
}
TITLES = {
    "cost": "cost of the store",
    "commits": "a commit alone, one token each",
    "takeover": "take-over",
    "replicas": "the same streams on more replicas",
    "idle": "idle, for each replica",
}


def arguments(command: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64], help="kept streams")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--replica-streams", type=int, default=64, help="streams on all replicas")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--takeover-streams",
        type=int,
        nargs="+",
        default=[1, 16, 64],
        help="at a take-over",
    )
    parser.add_argument(
        "--takeovers", type=int, nargs="+", default=[24, 6, 4], help="of each --takeover-streams"
    )
    parser.add_argument(
        "--save-interval",
        type=int,
        default=SHARED_SAVE_INTERVAL,
        help="tokens between two saved states",
    )
    parser.add_argument("--commits", type=int, default=500)
    parser.add_argument("--idle-seconds", type=float, default=15.0)
    parser.add_argument("--turns", type=int, default=16, help="turns of a hibernated session")
    parser.add_argument("--quick", action="store_true", help="short run, not for publication")
    options = parser.parse_args(command)
    if options.quick:
        vars(options).update(QUICK)
    return options


def main(command: Sequence[str] | None = None) -> None:
    """Measures, prints, and ends with the line of JSON."""
    exit_on_sigterm()
    options = arguments(command)
    result, parts = Result("cluster", options.output), {}
    # The servers inherit it; there is no flag.
    os.environ[f"{PREFIX}SAVE_INTERVAL_TOKENS"] = str(options.save_interval)
    for part in options.part:
        with tempfile.TemporaryDirectory() as folder:
            parts[part] = PARTS[part](Path(folder), options)
        show_figures(TITLES[part], parts[part])
    figures: Figures = {
        "settings": {name: getattr(options, name) for name in QUICK} | {"quick": options.quick},
        "load_at_end": machine()["load_at_start"],
        "parts": parts,
    }
    result.finish(figures)


if __name__ == "__main__":
    main()
