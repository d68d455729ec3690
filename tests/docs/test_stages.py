"""The table of a session's stages on the page is that of the code."""

from __future__ import annotations

from docs.stages import PAGE, drawn


def test_page_has_the_table_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert drawn(page) == page
