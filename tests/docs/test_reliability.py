"""docs/contribute/kept-sessions.md lists every numbered test, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import page, rows, section

ROOT = Path(__file__).parents[2]
TEXT = page("kept-sessions.md")


def test_each_numbered_line_has_its_test() -> None:
    numbers = [number for number, *_ in rows(section(TEXT, "The tests")) if number]
    assert [int(number) for number in numbers] == list(range(1, 41))
    files = {path.name for path in (ROOT / "tests/reliability").glob("test_[0-9][0-9]_*.py")}
    assert set(re.findall(r"tests/reliability/(test_\d\d_\w+\.py)", TEXT)) == files
    assert len(files) == 40


def test_each_test_across_replicas_is_listed() -> None:
    listed = re.findall(r"\.\./\.\./tests/reliability/(\w+\.py)", section(TEXT, "Across replicas"))
    files = sorted((ROOT / "tests/reliability").glob("test_[0-9][0-9]_*.py"))
    assert listed == [
        path.name for path in files if re.search(r"site: Site|mark\.database", path.read_text())
    ]
