"""The tables of docs/comparison.md are what the report makes of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.mechanisms.report import tables
from benchmarks.mechanisms.specs import Spec
from model.attention import MECHANISMS
from tests.docs.pages import page

RUNS = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/mechanisms.json").read_text(encoding="utf-8")
)["runs"]
TEXT = page("comparison.md")


@pytest.mark.parametrize("part", [p for p in tables(RUNS).split("\n\n") if p.startswith("|")])
def test_table_is_the_one_that_the_results_give(part: str) -> None:
    assert part in TEXT


def test_every_mechanism_was_compared() -> None:
    trained = {Spec.parse(run["mechanism"]).attention for run in RUNS if run["kind"] == "language"}
    recalled = {Spec.parse(run["mechanism"]).attention for run in RUNS if run["kind"] == "recall"}
    assert trained == recalled == MECHANISMS.keys()
