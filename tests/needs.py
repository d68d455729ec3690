"""Which tests need more than this process, and a guard that each of them says so by its marker.

`make quick` leaves these tests out. Most say it themselves; those that get a database or a
browser from a fixture, and all tests of some folders, are marked here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent

#: The markers of such tests; see pyproject.toml.
MARKERS = ("process", "browser", "database", "package")

#: Folders in which every test has the marker.
FOLDERS = {
    "benchmarks": "process",
    "browser": "browser",
    "chaos": "process",
    "clients": "process",
    "compat": "package",
    "deploy": "process",
    "fuzz": "process",
    "model/convert": "slow",
    "model/training": "slow",
    "reliability": "process",
    "security": "process",
    "server/cluster": "process",
    "server/cluster/ray": "package",
    "soak": "process",
}

#: Fixtures whose tests have the marker.
FIXTURES = {
    "browser": "browser",
    "postgres": "database",
}

#: What the interpreter reports before it starts a process.
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}

#: matplotlib asks it for the fonts of a machine on which it has no list of them yet.
ALLOWED = "fc-list"


def mark(items: Iterable[pytest.Item]) -> None:
    """Adds the markers of folders and fixtures."""
    for item in items:
        for folder in item.path.relative_to(TESTS).parents:
            if folder.as_posix() in FOLDERS:
                item.add_marker(FOLDERS[folder.as_posix()])
        for name in getattr(item, "fixturenames", ()):
            if name in FIXTURES:
                item.add_marker(FIXTURES[name])


def is_marked(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in MARKERS)


class Guard:
    """Fails a test without a marker of `MARKERS` that starts a process."""

    def __init__(self) -> None:
        self._started: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event in STARTS and args[:1] != (ALLOWED,):
            self._started.append(f"{event} {args[:2]}")

    def begin(self) -> None:
        """What was started before is no test's."""
        self._started.clear()

    def check(self, item: pytest.Item) -> None:
        """Raises `pytest.fail.Exception` where the test has started a process unannounced."""
        if self._started and not is_marked(item):
            pytest.fail(
                f"starts a process and has none of the markers {', '.join(MARKERS)}: "
                f"{self._started[0]}",
                pytrace=False,
            )
