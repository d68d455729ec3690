"""Stops a process as SIGSTOP does, and returns when it has stopped.

A signal is delivered some time after it was sent: on a busy machine a process that
was told to stop still answers a request or two.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def stop(pid: int) -> None:
    """Returns when no thread of ``pid`` runs. A process that has ended counts as stopped."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    while not set(_states(pid)) <= {"T", "t", "Z", "X"}:
        os.sched_yield()


def _states(pid: int) -> list[str]:
    """The letters by which the kernel names the state of each thread."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.append(stat.read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # this thread has ended
    return states
