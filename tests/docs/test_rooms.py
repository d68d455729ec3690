"""The README of each folder of the server and of the model names the files that are there.

That of the benchmarks too, and of their studies.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    file.parent
    for package in ("server", "model")
    for file in (ROOT / package).rglob("__init__.py")
    if "bundled" not in file.parts and any(file.parent.glob("[!_]*.py"))
)
FOLDERS += [ROOT / "benchmarks", ROOT / "benchmarks" / "studies"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_readme_names_each_file_and_folder(folder: Path) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    named = set(
        re.findall(r"`([\w.]+)/?`", " ".join(re.findall(r"^\|(.+?)\|", text, re.MULTILINE)))
    )
    files = {file.name for file in folder.glob("*.py")} - {"__init__.py", "__main__.py"}
    folders = {file.parent.name for file in folder.glob("*/__init__.py")}
    assert files | folders == named - {"claims"}  # which has no Python


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_readme_says_what_it_imports_and_where_to_begin(folder: Path) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    if folder.name != "linearize":
        assert "It may import" in text
        assert "Begin " in text
