"""Memory of many sessions of the bundled chat model, and of its original in llama.cpp.

    python -m benchmarks.checkpoints.chat_sessions

Each opens as many sessions as fit into memory, all of a text of the same length, in a process of
its own. What that process grows by is measured, from one session to all.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from benchmarks.checkpoints import chat
from benchmarks.checkpoints.__main__ import CHAT
from benchmarks.decode.peers import Point
from benchmarks.decode.worker import Worker
from benchmarks.machine import resident_bytes
from benchmarks.process import exit_on_sigterm
from benchmarks.report import Figures, Result, command_line, show_figures
from benchmarks.studies.pages.models import CHAT_SESSIONS, OURS, PEERS
from model.state import StateLayout

#: What one session takes, by those who have it: a state, or keys and values of all tokens.
SESSION_BYTES = {
    OURS: lambda tokens: StateLayout.of(chat.CONFIG).num_bytes,
    PEERS[0]: lambda tokens: tokens * chat.position_bytes(),
}


def measure(name: str, tokens: int, sessions: int, threads: int, folder: Path) -> Figures:
    """Resident memory of a process with one session and with ``sessions``."""
    found: Figures = {}
    with Worker(CHAT[name], folder, threads) as worker:
        for number in (1, sessions):
            worker.open(Point(chat.SIZE, "int8", number, tokens, threads))
            found[number] = resident_bytes(worker.pid)
    each = (found[sessions] - found[1]) / (sessions - 1)
    return {
        "sessions": sessions,
        "process_bytes": found[sessions],
        "measured_session_bytes": round(each),
        "computed_session_bytes": SESSION_BYTES[name](tokens),
    }


def main() -> None:
    """Measures both."""
    exit_on_sigterm()
    parser = command_line(__doc__, CHAT_SESSIONS)
    parser.add_argument("--tokens", type=int, default=8192, help="of each session")
    parser.add_argument("--sessions", type=int, nargs=2, default=[1000, 16], help="ours, theirs")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    result = Result("checkpoints.chat_sessions", options.output)
    figures: Figures = {"tokens": options.tokens}
    with tempfile.TemporaryDirectory() as folder:
        for name, number in zip(SESSION_BYTES, options.sessions, strict=True):
            figures[name] = measure(name, options.tokens, number, options.threads, Path(folder))
    show_figures("Memory of sessions", figures)
    result.finish(figures)


if __name__ == "__main__":
    main()
