"""Pages, messages of the server, and code use the terms of the glossary and plain phrases."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, flowed

ROOT = DOCS.parent
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
SOURCES = sorted((ROOT / "server").rglob("*.py"))
#: Packages whose docstrings, comments and names are checked too.
CHECKED = ("benchmarks", "clients", "model", "server")
#: Terms of earlier versions, and phrases that a reader would not search for.
AVOIDED = re.compile(
    r"\b(mailbox|outbox(es)?|porter|bur(y|ies|ied|ial)|journal's|debt|beside|for ever|whoever"
    r"|nobody's|lets? (it )?go|at rest|mend(s|ed)?|(kept|keeps?) to|of itself|anew"
    r"|go(es|ne)? on|went on|comes? and go(es)?|sleeping places?)\b",
    re.IGNORECASE,
)
CODE = re.compile(r"^```.*?^```|`[^`]*`", re.MULTILINE | re.DOTALL)
SLOGAN = "Tokens for ever"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_avoids_old_terms(path: Path) -> None:
    text = CODE.sub("", path.read_text(encoding="utf-8"))
    prose = flowed(text.replace(SLOGAN, ""))
    assert [prose[max(0, m.start() - 30) : m.end() + 30] for m in AVOIDED.finditer(prose)] == []


def test_messages_of_the_server_avoid_old_terms() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in SOURCES
        for text in messages(ast.parse(path.read_text(encoding="utf-8")))
        if AVOIDED.search(text)
    ]
    assert found == []


@pytest.mark.parametrize("package", CHECKED)
def test_code_avoids_old_terms(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for text in words(path.read_text(encoding="utf-8"))
        if AVOIDED.search(text.replace(SLOGAN, ""))
    ]
    assert found == []


def test_an_old_term_in_code_is_found() -> None:
    source = 'class PaidDebt:\n    """It goes\n    on."""\n    x = lets_go()  # anew\n'
    found = [text for text in words(source) if AVOIDED.search(text)]
    assert found == ["It goes on.", "Paid Debt", "lets go", "# anew"]


def test_an_old_term_is_found() -> None:
    tree = ast.parse('"""It goes on anew."""\nlog("goes on")\nrun("-- goes on\\nALTER TABLE")')
    assert list(messages(tree)) == ["goes on"]
    assert AVOIDED.search("the session goes on") and not AVOIDED.search("goes to sleep")


def words(source: str) -> Iterator[str]:
    """The docstrings, the names as words, and the comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield " ".join((ast.get_docstring(node) or "").split())
        for field in ("name", "id", "attr", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                yield re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def messages(tree: ast.AST) -> Iterator[str]:
    """The strings of more than one word that are neither docstrings nor SQL."""
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            text = node.value
            if isinstance(text, str) and " " in text and "ALTER TABLE" not in text:
                yield text
