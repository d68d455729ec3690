from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from ray.serve.config import AutoscalingContext

from server.cluster.ray.proxy import STREAMS, StreamsPolicy


def context(reported: dict[str, float] | None, now: int = 2) -> AutoscalingContext:
    metrics = {} if reported is None else {STREAMS: reported}
    made = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=now)
    return cast(AutoscalingContext, made)


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [
        ({"a": 0.0, "b": 0.0}, 1),
        ({"a": 10.0}, 1),
        ({"a": 10.5}, 2),
        ({"a": 10.0, "b": 10.0}, 2),
        ({"a": 0.0, "b": 21.0}, 3),
    ],
)
def test_replicas_follow_the_streams_of_all(reported: dict[str, float], wanted: int) -> None:
    assert StreamsPolicy(10)(context(reported)) == (wanted, {})


def test_number_stays_while_nobody_reports() -> None:
    assert StreamsPolicy(10)(context(None, now=3)) == (3, {})
