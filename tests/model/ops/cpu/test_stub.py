"""The stub for type checkers names what the extension module has."""

from __future__ import annotations

import ast
from pathlib import Path

from model.ops.cpu import _native


def test_stub_names_what_the_module_has() -> None:
    source = (Path(_native.__file__).parent / "_native.pyi").read_text(encoding="utf-8")
    stub = ast.parse(source).body
    classes = {node.name: names(node.body) for node in stub if isinstance(node, ast.ClassDef)}
    assert names(stub) | classes.keys() == public(_native)
    for name, members in classes.items():
        assert members - {"__init__"} == public(getattr(_native, name))


def names(body: list[ast.stmt]) -> set[str]:
    """Of functions and variables."""
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    variables = [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return functions | {target.id for target in variables if isinstance(target, ast.Name)}


def public(owner: object) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}
