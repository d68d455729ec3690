"""What the pages say of the default model is what its files and its results say."""

from __future__ import annotations

import pytest

from benchmarks.model_card.pages import PAGES, filled, places
from tests.docs.pages import DOCS


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_the_model(page: str) -> None:
    text = (DOCS.parent / page).read_text(encoding="utf-8")
    assert text == filled(page, text)


def test_each_page_has_figures() -> None:
    assert {place.page for place in places()} == set(PAGES)
