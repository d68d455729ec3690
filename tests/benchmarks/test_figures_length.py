"""The length benchmark: where a curve crosses that of softmax."""

from __future__ import annotations

import pytest

from benchmarks.studies.length import (
    Point,
    crossing,
    crossings,
)


def points(*seconds: float, peak: int = 1) -> list[Point]:
    return [Point(256 << i, s, peak) for i, s in enumerate(seconds)]


def test_crossing_lies_on_the_logarithmic_line_between_two_lengths() -> None:
    baseline = points(1.0, 4.0, 16.0)
    curve = points(2.0, 4.0 / 2.0**0.5, 8.0)  # 2, then 2^-1/2 of the baseline
    found = crossing(curve, baseline, lambda p: p.seconds)
    assert found == pytest.approx(256 * 2 ** (1 / 1.5))


def test_crossing_is_the_last_one() -> None:
    baseline = points(1.0, 1.0, 1.0, 1.0)
    found = crossing(points(0.5, 2.0, 2.0, 0.5), baseline, lambda p: p.seconds)
    assert found == pytest.approx(1024 * 2**0.5)


def test_curve_below_from_the_start_and_one_never_below() -> None:
    baseline = points(1.0, 1.0)
    assert crossing(points(0.5, 0.9), baseline, lambda p: p.seconds) == 0
    assert crossing(points(0.5, 1.1), baseline, lambda p: p.seconds) is None


def test_curve_that_ends_early_is_compared_as_far_as_it_goes() -> None:
    found = crossings({"prefill": {"slow": points(2.0), "softmax": points(1.0, 9.0)}})
    assert found == {"prefill": {"slow": {"time": None, "memory": None}}}
