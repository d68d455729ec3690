"""The committed comparison has every mechanism."""

from __future__ import annotations

from benchmarks.mechanisms.specs import Spec
from benchmarks.pages.comparison import RESULT
from benchmarks.report import read_result
from model.attention import MECHANISMS


def test_every_mechanism_was_compared() -> None:
    runs = read_result(RESULT)["runs"]
    trained = {Spec.parse(run["mechanism"]).attention for run in runs if run["kind"] == "language"}
    recalled = {Spec.parse(run["mechanism"]).attention for run in runs if run["kind"] == "recall"}
    assert trained == recalled == MECHANISMS.keys()
