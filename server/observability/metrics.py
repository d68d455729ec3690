"""The metrics of `/metrics`, in the Prometheus text format.

The event loop counts into plain integers, which costs a fraction of a microsecond
per token; the objects of prometheus_client are created at a scrape. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

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

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds its buckets to ``family`` under ``labels``."""
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(names, self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum)


class Metrics:
    """Latencies and finish reasons of one model's requests, over all its versions."""

    def __init__(self) -> None:
        self.ttft = Histogram(_TTFT_BOUNDS_S)
        self.inter_token = Histogram(_INTER_TOKEN_BOUNDS_S)
        self.finished: Counter[str] = Counter()

    def request_finished(self, event: Finished) -> None:
        self.finished[event.finish_reason or "appended"] += 1


class Scrape(NamedTuple):
    """One model at a scrape: ``engines`` are the counts of its versions, ended ones included."""

    model: str
    metrics: Metrics
    engines: Sequence[EngineStats]
    store_works: bool = True


def render(scrapes: Sequence[Scrape], num_websockets: int) -> bytes:
    """Returns all metrics in the text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsCollector(scrapes, num_websockets))
    return generate_latest(registry)


NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0)


def totals(*engines: EngineStats) -> EngineStats:
    """The sum of the running totals only, without gauges: what remains of engines that ended."""
    counts = asdict(NO_STATS)
    for stats in engines:
        for name, number in asdict(stats).items():
            if name.endswith("_total"):
                counts[name] += number
    return EngineStats(**counts)


class _MetricsCollector(Collector):
    def __init__(self, scrapes: Sequence[Scrape], num_websockets: int) -> None:
        self._scrapes, self._num_websockets = scrapes, num_websockets

    def collect(self) -> Iterator[Metric]:
        yield self._histogram(
            "everstream_ttft_seconds",
            "Time to first token in seconds, including the time in the queue.",
            lambda metrics: metrics.ttft,
        )
        yield self._histogram(
            "everstream_inter_token_seconds",
            "Inter-token latency in seconds.",
            lambda metrics: metrics.inter_token,
        )
        requests = CounterMetricFamily(
            "everstream_requests", "Number of finished requests.", labels=["model", "finish_reason"]
        )
        for scrape in self._scrapes:
            for reason, count in sorted(scrape.metrics.finished.items()):
                requests.add_metric([scrape.model, reason], count)
        yield requests
        yield GaugeMetricFamily(
            "everstream_websockets", "Number of open WebSocket connections.", self._num_websockets
        )
        works = GaugeMetricFamily(
            "everstream_store_works",
            "1 while the session store works, 0 while it fails.",
            labels=["model"],
        )
        for scrape in self._scrapes:
            works.add_metric([scrape.model], int(scrape.store_works))
        yield works
        for kind, name, help_text, label, counts in _ENGINE:
            family = kind(name, help_text, labels=["model", *([label] if label else [])])
            for scrape in self._scrapes:
                for value, of in counts.items():
                    total = sum(of(stats) for stats in scrape.engines)
                    family.add_metric([scrape.model, *([value] if label else [])], total)
            yield family

    def _histogram(
        self, name: str, help_text: str, of: Callable[[Metrics], Histogram]
    ) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, help_text, labels=["model"])
        for scrape in self._scrapes:
            of(scrape.metrics).add_to(family, [scrape.model])
        return family


_Count = Callable[[EngineStats], int]


class _Family(NamedTuple):
    """A metric of the engine: one count for each value of ``label``, if it has one."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help_text: str
    label: str
    counts: dict[str, _Count]


def _counter(name: str, help_text: str, count: _Count) -> _Family:
    return _Family(CounterMetricFamily, f"everstream_{name}", help_text, "", {"": count})


def _gauge(name: str, help_text: str, count: _Count) -> _Family:
    return _Family(GaugeMetricFamily, f"everstream_{name}", help_text, "", {"": count})


_ENGINE = (
    _Family(
        CounterMetricFamily,
        "everstream_tokens",
        "Number of computed tokens.",
        "kind",
        {
            "prompt": lambda stats: stats.prompt_tokens_total,
            "completion": lambda stats: stats.completion_tokens_total,
        },
    ),
    _Family(
        GaugeMetricFamily,
        "everstream_slots",
        "Number of slots in the state pool.",
        "state",
        {"held": lambda stats: stats.held_slots, "total": lambda stats: stats.max_sessions},
    ),
    _Family(
        GaugeMetricFamily,
        "everstream_state_bytes",
        "Size of the recurrent state in bytes.",
        "state",
        {
            "held": lambda stats: stats.held_slots * stats.state_bytes_per_session,
            "total": lambda stats: stats.max_sessions * stats.state_bytes_per_session,
        },
    ),
    _gauge(
        "sessions",
        "Number of sessions in memory, in a slot or hibernated.",
        lambda s: s.num_sessions,
    ),
    _gauge(
        "asleep_sessions", "Number of sessions in memory without a slot.", lambda s: s.num_asleep
    ),
    _gauge(
        "parked_requests",
        "Number of requests paused until a client reads them.",
        lambda s: s.num_parked,
    ),
    _counter(
        "evicted_sessions",
        "Number of sessions evicted from memory to the store.",
        lambda s: s.evicted_sessions_total,
    ),
    _counter(
        "preemptions",
        "Number of preemptions of a request by a waiting one.",
        lambda s: s.preemptions_total,
    ),
    _gauge(
        "prefix_entries", "Number of prefix cache entries in memory.", lambda s: s.prefix_entries
    ),
    _Family(
        CounterMetricFamily,
        "everstream_prefix_lookups",
        "Number of prefix cache lookups.",
        "result",
        {
            "hit": lambda stats: stats.prefix_hits_total,
            "miss": lambda stats: stats.prefix_misses_total,
        },
    ),
    _counter(
        "prefix_saved_tokens",
        "Number of prompt tokens whose state came from the prefix cache.",
        lambda s: s.prefix_saved_tokens_total,
    ),
    _Family(
        CounterMetricFamily,
        "everstream_draft_tokens",
        "Number of drafted tokens that were checked.",
        "result",
        {
            "accepted": lambda stats: stats.accepted_drafts_total,
            "rejected": lambda stats: stats.rejected_drafts_total,
        },
    ),
    _Family(
        CounterMetricFamily,
        "everstream_model_draft_tokens",
        "Number of those drafted by the draft model.",
        "result",
        {
            "accepted": lambda stats: stats.accepted_model_drafts_total,
            "rejected": lambda stats: stats.rejected_model_drafts_total,
        },
    ),
    _gauge("queue_requests", "Number of requests waiting in the queue.", lambda s: s.num_waiting),
    _gauge("running_requests", "Number of running requests.", lambda s: s.num_running),
    _counter(
        "expired_sessions",
        "Number of sessions that expired after their idle time.",
        lambda s: s.expired_sessions_total,
    ),
)
