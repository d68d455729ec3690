"""The glossary: sorted terms, each with a file that exists and names that it defines."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs.pages import DOCS, names, page

ROOT = DOCS.parent
#: A term, the file that owns it, and the names in code font after it.
ENTRY = re.compile(r"^\*\*(.+?)\*\* \(\[(.+?)\]\(\.\./\.\./(.+?)\)(?:: (.+))?\)$", re.MULTILINE)


def test_terms_are_sorted_and_defined_once() -> None:
    terms = [term.casefold() for term, *_ in entries()]
    assert len(terms) > 40
    assert terms == sorted(set(terms))


def test_every_paragraph_that_begins_bold_is_an_entry() -> None:
    assert len(re.findall(r"^\*\*", page("glossary.md"), re.MULTILINE)) == len(entries())


def test_owning_files_exist() -> None:
    missing = [path for _, label, path, _ in entries() if label != path or not is_file(path)]
    assert missing == []


def test_names_in_code_font_are_defined_in_the_owning_file() -> None:
    missing = [
        f"{path}: {name}"
        for _, _, path, cell in entries()
        for name in names(cell)
        if name not in defined(ROOT / path)
    ]
    assert missing == []


def test_linked_from_where_newcomers_begin() -> None:
    for start in (
        DOCS / "contribute/architecture.md",
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ):
        assert "glossary.md)" in start.read_text(encoding="utf-8"), start.name


def entries() -> list[tuple[str, str, str, str]]:
    """Term, link text, link target and the names of each entry."""
    return ENTRY.findall(page("glossary.md"))


def is_file(path: str) -> bool:
    return (ROOT / path).is_file()


def defined(path: Path) -> set[str]:
    """The names at the top of a module: classes, functions and assignments."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found
