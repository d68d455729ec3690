"""When a soak has passed: what the server's books and the kernel's must say at the end."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.soak.observation import Observation
from benchmarks.soak.wire import Tally

MIB = 1 << 20
MAX_GROWTH_BYTES = 16 * MIB
MAX_GROWTH_SHARE = 0.05
LOG_CHARS = 6000


@dataclass(frozen=True)
class Ending:
    """How the process ended."""

    exit_code: int
    log: str


def verdict(
    before: Observation, warm: Observation, after: Observation, tally: Tally, ending: Ending
) -> list[str]:
    """Every criterion that failed, empty for a pass.

    The server was seen ``before`` any load, ``warm`` after the warm-up, and ``after`` it all.
    """
    failures = [*after.leftovers(before), *tally.problems]
    growth = after.resident_bytes - warm.resident_bytes
    if growth >= max(MAX_GROWTH_BYTES, MAX_GROWTH_SHARE * warm.resident_bytes):
        failures.append(f"resident memory grew by {growth / MIB:.1f} MiB")
    failures += [
        f"{count} answers had status {status}"
        for status, count in sorted(tally.statuses.items())
        if status >= 500 and status != 503
    ]
    if ending.exit_code != 0:
        failures.append(f"the server ended with exit code {ending.exit_code}")
    if found := re.search(r"Traceback| ERROR ", ending.log):
        start = ending.log.rfind("\n", 0, found.start()) + 1
        failures.append(f"in the server's log:\n{ending.log[start : start + LOG_CHARS]}")
    return failures
