"""The benchmark of durable sessions: its figures and targets."""

from __future__ import annotations

from benchmarks.sessions.log import rows_of
from benchmarks.sessions.report import Row, Target, times


def test_target_is_met_on_its_side_of_the_bound() -> None:
    at_most, at_least = Target(20.0, of="p99"), Target(0.9, "at least")
    assert Row("wake", 30.0, "ms", 19.0, at_most).is_met
    assert not Row("wake", 3.0, "ms", 21.0, at_most).is_met
    assert Row("log", 0.9, "x", target=at_least).is_met
    assert not Row("log", 0.89, "x", target=at_least).is_met
    assert Row("log", 0.1, "x").is_met is None


def test_times_are_milliseconds_at_the_median() -> None:
    row = times("x", [0.001, 0.002, 0.009])
    assert (row.value, row.unit) == (2.0, "ms")
    assert row.p99 is not None
    assert 8.0 < row.p99 <= 9.0
    assert times("x", [0.004]).p99 is None


def test_cost_of_the_log_is_a_ratio_within_a_round() -> None:
    def runs(*speeds: float) -> list[dict[str, float]]:
        return [{"tokens_per_s": s, "itl_p99_ms": 1.0, "cpu_us_per_token": 2.0} for s in speeds]

    rows = {
        row.name: row
        for row in rows_of(
            {"unkept": runs(100, 10, 50), "kept, full durability": runs(95, 9.5, 20)}
        )
    }
    ratio = rows["kept, full durability / unkept"]
    assert (ratio.value, ratio.is_met) == (0.95, True)  # by round: 0.95, 0.95, 0.4
    assert rows["unkept"].value == 50
