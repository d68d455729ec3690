"""The page of published models has the layouts that are tested."""

from __future__ import annotations

from pathlib import Path

from tests.published_layouts import LAYOUTS, table

PAGE = Path(__file__).parents[2] / "docs" / "models" / "rwkv7.md"


def test_page_has_the_table_of_layouts() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = text.partition("<!-- layouts -->\n\n")[2].partition("\n<!-- end of layouts -->")[0]
    assert found == table()


def test_layouts_have_names_of_their_own() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)
