"""Links between pages lead somewhere, and the architecture names files and rules that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, page, section

ROOT = DOCS.parent
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / f"{n}.md" for n in ("README", "CHANGELOG"))])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_resolve(path: Path) -> None:
    broken = []
    for target in links(path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_layout_names_what_exists() -> None:
    folder, missing = ROOT, []
    for line in re.findall(
        r"^    (.+)$", section(page("architecture.md"), "The layout"), re.MULTILINE
    ):
        paths = re.split(r"\s{2,}", line.strip())[0].split()
        base = folder if line.startswith("  ") else ROOT
        missing += [str(base / path) for path in paths if not (base / path).exists()]
        if base == ROOT:
            folder = ROOT / paths[0]
    assert missing == []


def links(text: str) -> Iterator[str]:
    """The relative links of a page."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            yield target


def anchors(path: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
