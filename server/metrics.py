"""What `/metrics` says, in Prometheus' text format.

The event loop counts into plain integers, which costs a fraction of a microsecond
per token; the library's objects are made at a scrape. One thread only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from server.engine.types import EngineStats, Finished

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0),
)


class Histogram:
    """Counts of observations in buckets with inclusive upper bounds, in seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Counts ``count`` observations of ``value``."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, name: str, help_text: str) -> HistogramMetricFamily:
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(names, self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=self._sum)


class Metrics(Collector):
    """The server's counters. `render` adds the engine's own numbers."""

    def __init__(self) -> None:
        self.ttft = Histogram(_TTFT_BOUNDS_S)
        self.inter_token = Histogram(_INTER_TOKEN_BOUNDS_S)
        self.websockets = 0
        self.store_works = True
        self._finished: Counter[str] = Counter()
        self._stats: EngineStats | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def request_finished(self, event: Finished) -> None:
        self._finished[event.finish_reason or "appended"] += 1

    def render(self, stats: EngineStats) -> bytes:
        """The exposition of all metrics with ``stats`` as the engine's side."""
        self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield self.ttft.family("everstream_ttft_seconds", "From submission to the first token")
        yield self.inter_token.family(
            "everstream_inter_token_seconds", "Between two tokens of a request"
        )
        requests = CounterMetricFamily(
            "everstream_requests", "Requests that ended", labels=["finish_reason"]
        )
        for reason, count in sorted(self._finished.items()):
            requests.add_metric([reason], count)
        yield requests
        yield GaugeMetricFamily(
            "everstream_websockets", "Open WebSocket connections", self.websockets
        )
        yield GaugeMetricFamily(
            "everstream_store_works", "1 where kept sessions can go on", int(self.store_works)
        )
        if self._stats is not None:
            yield from _engine_families(self._stats)


def _engine_families(stats: EngineStats) -> Iterator[Metric]:
    tokens = CounterMetricFamily("everstream_tokens", "Tokens computed", labels=["kind"])
    tokens.add_metric(["prompt"], stats.prompt_tokens_total)
    tokens.add_metric(["completion"], stats.completion_tokens_total)
    yield tokens
    slots = GaugeMetricFamily("everstream_slots", "Slots of the state pool", labels=["state"])
    slots.add_metric(["held"], stats.held_slots)
    slots.add_metric(["total"], stats.max_sessions)
    yield slots
    memory = GaugeMetricFamily("everstream_state_bytes", "Bytes of state", labels=["state"])
    memory.add_metric(["held"], stats.held_slots * stats.state_bytes_per_session)
    memory.add_metric(["total"], stats.max_sessions * stats.state_bytes_per_session)
    yield memory
    yield GaugeMetricFamily(
        "everstream_sessions", "Sessions in memory, in a slot or asleep", stats.num_sessions
    )
    yield GaugeMetricFamily(
        "everstream_asleep_sessions", "Sessions in memory without a slot", stats.num_asleep
    )
    yield GaugeMetricFamily(
        "everstream_parked_requests", "Requests that rest until somebody reads", stats.num_parked
    )
    yield CounterMetricFamily(
        "everstream_evicted_sessions",
        "Sessions that left memory for the store",
        stats.evicted_sessions_total,
    )
    yield CounterMetricFamily(
        "everstream_preemptions",
        "Times that a request made room for one that waited",
        stats.preemptions_total,
    )
    yield from _prefix_families(stats)
    yield GaugeMetricFamily(
        "everstream_queue_requests", "Requests that wait for the engine", stats.num_waiting
    )
    yield GaugeMetricFamily(
        "everstream_running_requests", "Requests that compute", stats.num_running
    )
    yield CounterMetricFamily(
        "everstream_expired_sessions",
        "Sessions whose idle time was over",
        stats.expired_sessions_total,
    )


def _prefix_families(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "everstream_prefix_entries", "States of prompts that are kept", stats.prefix_entries
    )
    lookups = CounterMetricFamily(
        "everstream_prefix_lookups", "Prompts looked for among them", labels=["result"]
    )
    lookups.add_metric(["hit"], stats.prefix_hits_total)
    lookups.add_metric(["miss"], stats.prefix_misses_total)
    yield lookups
    yield CounterMetricFamily(
        "everstream_prefix_saved_tokens",
        "Tokens of prompts that had not to be computed",
        stats.prefix_saved_tokens_total,
    )
