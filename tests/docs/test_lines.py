"""Prose on every page has lines of at most 120 characters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS

ROOT = DOCS.parent
MAX_CHARS = 120
CLIENT_READMES = (ROOT / "clients").glob("*/README.md")
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *CLIENT_READMES])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_has_lines_of_at_most_120_characters(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [line for line in prose(text) if len(line) > MAX_CHARS] == []


def test_a_long_line_is_found() -> None:
    long = "word " * 30 + "end"
    exempt = f"| {long} |\n\n```sh\n{long}\n```\n\n![{long}](a.png)\n\n    {long}\n\n"
    found = [line for line in prose(f"{exempt}{long}\n- {long}\n") if len(line) > MAX_CHARS]
    assert found == [long, f"- {long}"]


def prose(text: str) -> Iterator[str]:
    """The lines of a page less those that cannot be wrapped: code, rows of tables and pictures."""
    in_code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith(("    ", "|", "![")):
            yield line
    assert not in_code
