"""The results of a run: percentiles, throughput, and goodput against stated limits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clients.bench.load import Load, Timed


class Limits(NamedTuple):
    """Latency limits of a good request, in milliseconds; None is no limit.

    ``itl_ms`` is the limit of the mean time between its tokens.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def are_kept_by(self, timed: Timed) -> bool:
        """Whether a request succeeded within the limits."""
        if timed.error is not None or timed.ttft_s is None:
            return False
        gaps = timed.inter_token_s
        mean_s = sum(gaps) / len(gaps) if gaps else 0.0
        in_time = self.ttft_ms is None or timed.ttft_s * 1000 <= self.ttft_ms
        return in_time and (self.itl_ms is None or mean_s * 1000 <= self.itl_ms)


@dataclass(frozen=True)
class Summary:
    """One level's figures, as printed. Times are in milliseconds, None if nothing was measured.

    ``goodput_per_s`` is the number of requests per second within the limits. Either
    ``streams``, the number of concurrent ones, or ``rate``, the arrival rate, is None.
    """

    streams: int | None
    rate: float | None
    requests: int
    tokens: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p90_ms: float | None
    itl_p99_ms: float | None
    latency_p50_ms: float | None
    latency_p90_ms: float | None
    latency_p99_ms: float | None
    errors: int


def summarize(load: Load, timed: Sequence[Timed], seconds: float, limits: Limits) -> Summary:
    """The figures of a run that took ``seconds``."""
    num_tokens = sum(one.num_tokens for one in timed)
    num_good = sum(map(limits.are_kept_by, timed))
    done = [one for one in timed if one.error is None]
    times = {
        "ttft": [one.ttft_s for one in timed if one.ttft_s is not None],
        "itl": [gap for one in timed for gap in one.inter_token_s],
        "latency": [one.latency_s for one in done],
    }
    percentiles = {
        f"{name}_p{percent}_ms": percentile_ms(times_s, percent)
        for name, times_s in times.items()
        for percent in (50, 90, 99)
    }
    return Summary(
        streams=load.num_streams if load.rate is None else None,
        rate=load.rate,
        requests=len(timed),
        tokens=num_tokens,
        seconds=round(seconds, 6),
        tokens_per_s=round(num_tokens / seconds, 1),
        requests_per_s=round(len(done) / seconds, 3),
        goodput_per_s=round(num_good / seconds, 3),
        **percentiles,
        errors=len(timed) - len(done),
    )


def errors_of(timed: Sequence[Timed]) -> Counter[str]:
    """The number of requests that failed with each code."""
    return Counter(one.error for one in timed if one.error is not None)


def percentile_ms(times_s: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile: the smallest time that ``percent`` % of all do not exceed."""
    if not times_s:
        return None
    rank = max(1, math.ceil(percent * len(times_s) / 100))
    return round(sorted(times_s)[rank - 1] * 1000, 3)
