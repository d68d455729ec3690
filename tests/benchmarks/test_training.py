"""The training benchmark: its parts of a step, and its result."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.report import read_result
from benchmarks.training import ATTENTIONS, PRECISIONS, RESULT, part_of


def event(name: str, parent: SimpleNamespace | None = None) -> SimpleNamespace:
    return SimpleNamespace(name=name, cpu_parent=parent)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("aten::mm", "products"),
        ("DeltaBackward", "attention"),
        ("Convolution", "convolution"),
        ("AddNormBackward", "norms"),
        ("Swiglu", "MLP element-wise"),
        ("aten::copy_", "casts and copies"),
        ("aten::silu", "other element-wise"),
        ("MulBackward0", "autograd and rest"),
    ],
)
def test_operations_are_counted_by_part(name: str, part: str) -> None:
    assert part_of(event(name)) == part


def test_what_the_optimizer_calls_is_its_own() -> None:
    step = event("Optimizer.step#SplitMuon.step")
    assert part_of(event("aten::mm", event("aten::matmul", step))) == "optimizer"


def test_result_has_every_mechanism_in_both_precisions() -> None:
    measured = {(row["attention"], row["precision"]) for row in read_result(RESULT)["speed"]}
    assert {(name, precision) for name in ATTENTIONS for precision in PRECISIONS} <= measured
