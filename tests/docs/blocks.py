"""The blocks of code of a page, fenced or indented."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import DOCS

ROOT = DOCS.parent
#: The folders of the pages for those who use Everstream.
FOLDERS = ("start", "use", "operate", "reference", "background", "models")
USERS_PAGES = [
    ROOT / "README.md",
    DOCS / "README.md",
    *sorted(path for folder in FOLDERS for path in (DOCS / folder).glob("*.md")),
]
SHELL = ("sh", "bash", "")
FENCE = re.compile(r" *(`{3,})(\w*)$")
BEGINS_AS_FENCE = re.compile(r" *(`{3}|~{3})")


@dataclass(frozen=True, slots=True)
class Block:
    """``page`` is a path from the root; the ``language`` of an indented block is empty."""

    page: str
    language: str
    text: str

    @property
    def first(self) -> str:
        """The first line."""
        return self.text.partition("\n")[0]

    @property
    def commands(self) -> list[str]:
        """The lines of a shell's block, continued lines as one."""
        return self.text.replace("\\\n", " ").splitlines()


def blocks_of(path: Path) -> Iterator[Block]:
    """In the order of the page. Raises `ValueError` for a fence that is not in `FENCE`'s form."""
    page, lines = path.relative_to(ROOT).as_posix(), path.read_text("utf-8").splitlines()
    is_after_blank, at = True, 0
    while at < len(lines):
        begin = at
        at += 1
        if fence := FENCE.match(lines[begin]):
            while lines[at].strip() != fence[1]:
                at += 1
            yield Block(page, fence[2], textwrap.dedent("\n".join(lines[begin + 1 : at])))
            at += 1
        elif BEGINS_AS_FENCE.match(lines[begin]):
            raise ValueError(f"{page}:{begin + 1}: not the beginning of a block: {lines[begin]}")
        elif is_after_blank and lines[begin].startswith("    "):
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            yield Block(page, "", textwrap.dedent("\n".join(lines[begin:at])))
        is_after_blank = not lines[at - 1]


def shell_lines(path: Path) -> Iterator[str]:
    """The lines of a page's blocks for a shell, continued lines as one."""
    for block in blocks_of(path):
        if block.language in SHELL:
            yield from block.commands
