"""What a user is told where the extension module lacks this processor's level.

An editable install has one level, that of the processor that it was compiled on; wheels have all.
A module that moved to another processor runs the best of its levels that is left, if there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

COMPILE_HERE = (
    f"compile it here: {sys.executable} -m pip install --no-build-isolation --no-deps --editable"
    f" {Path(__file__).parents[2]}"
)


def why_none_runs(built: Sequence[str], processor: Sequence[str]) -> str | None:
    """One line where no level of the module is the processor's; these have the best first."""
    if set(built) & set(processor):
        return None
    best = processor[0] if processor else "none of the levels"
    return f"it was compiled for {', '.join(built)}, and this processor has {best}; {COMPILE_HERE}"


def better_level(built: Sequence[str], processor: Sequence[str]) -> str | None:
    """One line where a level runs, and the processor has a better one."""
    used = next(level for level in processor if level in built)
    if used == processor[0]:
        return None
    return f"the native runtime runs {used}, without kernels for {processor[0]}; {COMPILE_HERE}"
