"""docs/operate/troubleshooting.md quotes messages and codes that the server has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from server.api.errors import OUTCOMES
from tests.docs.pages import DOCS, names, page, rows

TEXT = page("troubleshooting.md")
#: What is quoted in first columns, but for names of flags, fields and programs.
QUOTED = [text for row in rows(TEXT) for text in names(row[0])]
CODES = set(re.findall(r"\b[45]\d\d `(\w+)`", TEXT))


def strings() -> Iterator[str]:
    """Every text of the source of server and runtime; three dots stand for a value in it."""
    folders = (DOCS.parent / name for name in ("server", "model/native"))
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else "..." for part in node.values
                )
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[rsd]", "...", node.value)


SOURCE = "\n".join(strings())


@pytest.mark.parametrize("message", QUOTED)
def test_message_is_in_the_source(message: str) -> None:
    pattern = "[^\n]*".join(re.escape(part) for part in message.split("..."))
    assert re.search(pattern, SOURCE), message


def test_codes_exist() -> None:
    assert CODES
    assert set(OUTCOMES) >= CODES
