"""Tests that need more than their process say so, and a test that does not say so fails."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.needs import FOLDERS, MARKERS, SMOKE, TESTS, Guard, mark

pytestmark = pytest.mark.process


def item(path: str, *markers: str, fixtures: tuple[str, ...] = ()) -> Any:
    """A test as pytest shows it to its hooks."""
    held = list(markers)
    return SimpleNamespace(
        path=TESTS / path,
        name="test_it",
        fixturenames=fixtures,
        held=held,
        add_marker=held.append,
        get_closest_marker=lambda name: name if name in held else None,
    )


def start_process() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def test_process_without_a_marker_fails_the_test() -> None:
    guard = Guard()
    guard.check(item("a.py"))
    start_process()
    with pytest.raises(pytest.fail.Exception, match=r"none of the markers process, .*subprocess"):
        guard.check(item("a.py"))


@pytest.mark.parametrize("marker", MARKERS)
def test_process_with_a_marker_passes(marker: str) -> None:
    guard = Guard()
    start_process()
    guard.check(item("a.py", marker))


def test_folders_and_fixtures_bring_their_markers() -> None:
    test = item("server/cluster/ray/test_a.py", fixtures=("postgres",))
    mark([test])
    assert set(test.held) == {"process", "package", "database"}
    plain = item("server/test_a.py", fixtures=("tmp_path",))
    mark([plain])
    assert plain.held == ["unit"]


def test_folders_are_there() -> None:
    assert all((TESTS / folder).is_dir() for folder in FOLDERS)


def test_smoke_is_there() -> None:
    for path, name in SMOKE.items():
        assert f"def {name}(" in (TESTS / path).read_text(encoding="utf-8"), path
