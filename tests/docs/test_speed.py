"""The tables of docs/speed.md and of the README are those that the committed results give."""

from __future__ import annotations

import pytest

from benchmarks.decode.shapes import SIZES
from benchmarks.speed_report.results import read
from benchmarks.speed_report.tables import readme_tables, tables
from tests.docs.pages import DOCS, page, rows, section

RESULTS = read()
README = section((DOCS.parent / "README.md").read_text(encoding="utf-8"), "What it costs")


@pytest.mark.parametrize("part", tables(RESULTS))
def test_table_is_the_one_that_the_results_give(part: str) -> None:
    assert part in page("speed.md")


@pytest.mark.parametrize("part", readme_tables(RESULTS))
def test_readme_has_figures_of_the_results(part: str) -> None:
    assert part in README


def test_every_table_of_the_page_was_made_from_the_results() -> None:
    made = {tuple(row) for part in tables(RESULTS) for row in rows(part)}
    assert {tuple(row) for row in rows(page("speed.md"))} == made


def test_both_sizes_were_decoded_on_one_thread_and_two() -> None:
    found = {(row["size"], row["threads"]) for row in RESULTS["decode"]["rows"]}
    assert found == {(size, threads) for size in SIZES if size != "tiny" for threads in (1, 2)}
