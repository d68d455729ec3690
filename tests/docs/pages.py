"""Reads the parts of a documentation page that tests compare with the code, and its flags."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from typer import Context
from typer.main import get_group

from server.cli.main import app

DOCS = Path(__file__).parent.parent.parent / "docs"


def page(name: str) -> str:
    """The text of the page of this name, in whichever folder of ``docs`` it is."""
    (path,) = DOCS.rglob(name)
    return path.read_text(encoding="utf-8")


def flowed(text: str) -> str:
    """A text without its line breaks, for what may stand on two lines."""
    return " ".join(text.split())


def section(text: str, heading: str) -> str:
    """What stands between the heading ``## heading`` and the next one of its level."""
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, heading
    return rest.partition("\n## ")[0]


def json_examples(text: str) -> list[dict[str, Any]]:
    """The objects in the fenced json blocks, one to a line."""
    blocks: list[str] = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [json.loads(line) for block in blocks for line in block.splitlines()]


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows in ``text``, heads left out, backquotes kept."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {i for i, line in enumerate(lines) if set(line) <= set("|-: ")}
    kept = [line for i, line in enumerate(lines) if i not in heads and i + 1 not in heads]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]


def names(cell: str) -> list[str]:
    """What stands in backquotes."""
    return re.findall(r"`([^`]+)`", cell)


def flags(command: str) -> set[str]:
    """The flags that ``everstream command`` takes."""
    group = get_group(app)
    found = group.get_command(Context(group), command)
    assert found is not None, command
    return {flag for parameter in found.params for flag in parameter.opts}
