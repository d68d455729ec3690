"""Durable sessions: what they cost, and how quickly they come back.

Forks, snapshots and hibernation in the engine alone; waking, resuming, a restart, the log and the
prefix cache as a user of a real server sees them. Servers have one thread. Each part can be run by
itself (``--part restart``); targets are next to the figures, and the last line is JSON.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.process import exit_on_sigterm
from benchmarks.report import Figures, Result, command_line, show
from benchmarks.sessions import engine, log, prompts, server, sleeping
from benchmarks.sessions.report import Row, figures_of, table_of

Part = Callable[[Path, argparse.Namespace], list[Row]]

PARTS: dict[str, Part] = {
    "engine": lambda folder, o: engine.measure(folder, o.woken, o.rounds),
    "wake": lambda folder, o: server.wake(folder, o.woken),
    "resume": lambda folder, o: server.resume(folder, o.rounds),
    "restart": lambda folder, o: server.restart(folder, o.sessions, o.starts),
    "log": lambda folder, o: log.measure(folder, o.streams, o.max_tokens, o.log_rounds),
    "prefix": lambda folder, o: prompts.prefix(folder, o.prefixes, o.prefix_rounds),
    "text": lambda folder, o: prompts.text(folder, o.texts, o.text_rounds),
    "sleeping": lambda folder, o: sleeping.measure(folder, o.sleeping),
}
QUICK: Figures = {
    "woken": 6,
    "rounds": 2,
    "sessions": 12,
    "starts": 1,
    "streams": 2,
    "max_tokens": 8,
    "log_rounds": 1,
    "prefixes": [100],
    "prefix_rounds": 1,
    "texts": [2000],
    "text_rounds": 2,
    "sleeping": 300,
}


def arguments(command: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--rounds", type=int, default=100, help="rounds of forks, snapshots, resumes"
    )
    parser.add_argument("--woken", type=int, default=300, help="sessions that hibernate and wake")
    parser.add_argument(
        "--sessions", type=int, default=10_000, help="sessions restored by a restart"
    )
    parser.add_argument(
        "--starts", type=int, default=5, help="starts after a drain and after a kill"
    )
    parser.add_argument("--streams", type=int, default=64, help="streams to log")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens of each stream")
    parser.add_argument("--log-rounds", type=int, default=5)
    parser.add_argument("--prefixes", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--prefix-rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, nargs="+", default=[420_000], help="characters")
    parser.add_argument("--text-rounds", type=int, default=20)
    parser.add_argument(
        "--sleeping", type=int, default=10_000, help="hibernated sessions of a tiny model"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; default: temporary"
    )
    parser.add_argument("--quick", action="store_true", help="short run, not for publication")
    options = parser.parse_args(command)
    if options.quick:
        vars(options).update(QUICK)
    return options


def main(command: Sequence[str] | None = None) -> None:
    """Measures, prints, and ends with the line of JSON."""
    exit_on_sigterm()
    options = arguments(command)
    result, figures = Result("sessions", options.output), {}
    for part in options.part:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rows = PARTS[part](Path(folder), options)
        show(table_of(part, rows))
        figures[part] = figures_of(rows)
    settings = {name: getattr(options, name) for name in QUICK}
    result.finish({**settings, "quick": options.quick, "parts": figures})


if __name__ == "__main__":
    main()
