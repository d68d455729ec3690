"""Libraries whose private parts are used: tested versions, and the files that rely on them."""

from __future__ import annotations

import ast
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent

#: The versions with which all tests have passed. A new one comes in after they pass with it.
TESTED = {"uvicorn": ("0.54.0",), "ray": ("2.60.0",)}

#: The modules of each that are private, by the file that relies on them.
PRIVATE = {
    "uvicorn": {
        "server/http/protocols.py": ("uvicorn.protocols",),
    },
    "ray": {"server/cluster/ray/internals.py": ("ray._private", "ray.serve._private")},
}


def requirement(name: str) -> Requirement:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(each for extra in extras for each in extra)]
    (found,) = (r for r in map(Requirement, wanted) if r.name == name)
    return found


@pytest.mark.parametrize("name", TESTED)
def test_installed_version_is_a_tested_one(name: str) -> None:
    files = ", ".join(PRIVATE[name])
    assert version(name) in TESTED[name], (
        f"{name} {version(name)} is not among the tested versions {TESTED[name]}: {files} rely on"
        f" private parts of it. Run all tests with it, then add it here and widen the range in"
        f" pyproject.toml."
    )


@pytest.mark.parametrize("name", TESTED)
def test_range_has_the_tested_versions_and_no_later_minor_one(name: str) -> None:
    allowed = requirement(name).specifier
    assert all(tested in allowed for tested in TESTED[name])
    lowest, last = (pick(map(Version, TESTED[name])) for pick in (min, max))
    assert f"{lowest.major}.{lowest.minor - 1}.0" not in allowed
    assert f"{last.major}.{last.minor + 1}.0" not in allowed
    assert f"{last.major + 1}.0.0" not in allowed


@pytest.mark.parametrize("name", TESTED)
def test_files_that_rely_on_private_parts_are_named(name: str) -> None:
    prefixes = {prefix for found in PRIVATE[name].values() for prefix in found}
    relying = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "server").rglob("*.py")
        if any(is_private(target, prefixes) for target in imported(path))
    }
    assert relying == PRIVATE[name].keys()


def imported(path: Path) -> set[str]:
    """The modules that a file imports from."""
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def is_private(target: str, prefixes: set[str]) -> bool:
    return any(target == prefix or target.startswith(prefix + ".") for prefix in prefixes)
