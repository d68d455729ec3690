"""docs/contribute/store.md names functions, classes and tables that exist where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from server.store.log import MAX_JOURNAL_ROWS, SEGMENT_ENTRIES
from server.store.postgres import database as shared
from server.store.postgres import link
from server.store.rows import TABLES
from server.store.sqlite import database as sqlite
from server.store.sqlite.database import CHECKPOINT_PAGES
from tests.docs.pages import flowed, names, page, rows, section

ROOT = Path(__file__).parents[2]
TEXT = page("store.md")
#: The file of a link and the names after it.
NAMED = re.findall(r"\[(server/[\w/]+\.py)\]\(\.\./\.\./\1\):\s+(`[\w.]+`(?:,\s+`[\w.]+`)*)", TEXT)
SQL = TABLES + shared.MIGRATIONS[0] + sqlite.MIGRATIONS[0]


def defined(path: Path) -> set[str]:
    """Classes, functions, ``Class.method`` and constants of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            inner = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {node.name, *(f"{node.name}.{each.name}" for each in inner)}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize(("file", "listed"), NAMED)
def test_names_are_defined_in_their_files(file: str, listed: str) -> None:
    assert set(names(listed)) <= defined(ROOT / file)


def test_every_link_to_code_has_names() -> None:
    assert len(NAMED) == TEXT.count("](../../server/") > 30


def test_tables_exist() -> None:
    tables = {name for row in rows(section(TEXT, "What is stored")) for name in names(row[0])}
    assert tables == {
        "journal",
        "session",
        "segment",
        "snapshot",
        "identity",
        "request_key",
        "meta",
    }
    for table in (*tables, "object", "replica", "key_claim", "garbage", "prefix", "named_state"):
        assert f"CREATE TABLE {table} (" in SQL, table
    assert "CREATE FUNCTION append_journal(" in SQL


def test_numbers_are_those_of_the_code() -> None:
    text = flowed(TEXT)
    assert f"{SEGMENT_ENTRIES} to {2 * SEGMENT_ENTRIES - 1} entries" in text
    assert f"older than {MAX_JOURNAL_ROWS:,} rows" in text
    assert f"({link.MAX_JOURNAL_ROWS} in a shared store)" in text
    assert f"when it has {CHECKPOINT_PAGES} pages" in text


def test_each_step_has_its_line_after_a_crash() -> None:
    steps = [int(number) for number in re.findall(r"^(\d+)\. \*\*", TEXT, re.MULTILINE)]
    assert steps == [*range(1, len(steps) + 1)]
    lines = [row[0] for row in rows(TEXT) if row[0][:1].isdigit()]
    assert lines == ["1 to 3", *map(str, range(4, len(steps) + 1))]
