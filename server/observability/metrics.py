"""What `/metrics` says, in Prometheus' text format.

The event loop counts into plain integers, which costs a fraction of a microsecond
per token; the library's objects are made at a scrape. One thread only.
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
    """What one model's requests have been, over all its versions."""

    def __init__(self) -> None:
        self.ttft = Histogram(_TTFT_BOUNDS_S)
        self.inter_token = Histogram(_INTER_TOKEN_BOUNDS_S)
        self.finished: Counter[str] = Counter()

    def request_finished(self, event: Finished) -> None:
        self.finished[event.finish_reason or "appended"] += 1


class Scrape(NamedTuple):
    """One model at one moment: ``engines`` are the counts of its versions, ended ones too."""

    model: str
    metrics: Metrics
    engines: Sequence[EngineStats]
    store_works: bool = True


def render(scrapes: Sequence[Scrape], num_websockets: int) -> bytes:
    """The exposition of all metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(scrapes, num_websockets))
    return generate_latest(registry)


NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0)


def totals(*engines: EngineStats) -> EngineStats:
    """The sum of the running totals alone: what counts of engines that are no more."""
    counts = asdict(NO_STATS)
    for stats in engines:
        for name, number in asdict(stats).items():
            if name.endswith("_total"):
                counts[name] += number
    return EngineStats(**counts)


class _Page(Collector):
    def __init__(self, scrapes: Sequence[Scrape], num_websockets: int) -> None:
        self._scrapes, self._num_websockets = scrapes, num_websockets

    def collect(self) -> Iterator[Metric]:
        yield self._histogram(
            "everstream_ttft_seconds",
            "From submission to the first token",
            lambda metrics: metrics.ttft,
        )
        yield self._histogram(
            "everstream_inter_token_seconds",
            "Between two tokens of a request",
            lambda metrics: metrics.inter_token,
        )
        requests = CounterMetricFamily(
            "everstream_requests", "Requests that ended", labels=["model", "finish_reason"]
        )
        for scrape in self._scrapes:
            for reason, count in sorted(scrape.metrics.finished.items()):
                requests.add_metric([scrape.model, reason], count)
        yield requests
        yield GaugeMetricFamily(
            "everstream_websockets", "Open WebSocket connections", self._num_websockets
        )
        works = GaugeMetricFamily(
            "everstream_store_works", "1 while kept sessions can continue", labels=["model"]
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
    """A family of an engine's counts: one for each value of its label next to the model's."""

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
        "Tokens computed",
        "kind",
        {
            "prompt": lambda stats: stats.prompt_tokens_total,
            "completion": lambda stats: stats.completion_tokens_total,
        },
    ),
    _Family(
        GaugeMetricFamily,
        "everstream_slots",
        "Slots of the state pool",
        "state",
        {"held": lambda stats: stats.held_slots, "total": lambda stats: stats.max_sessions},
    ),
    _Family(
        GaugeMetricFamily,
        "everstream_state_bytes",
        "Bytes of state",
        "state",
        {
            "held": lambda stats: stats.held_slots * stats.state_bytes_per_session,
            "total": lambda stats: stats.max_sessions * stats.state_bytes_per_session,
        },
    ),
    _gauge("sessions", "Sessions in memory, in a slot or hibernated", lambda s: s.num_sessions),
    _gauge("asleep_sessions", "Sessions in memory without a slot", lambda s: s.num_asleep),
    _gauge(
        "parked_requests", "Requests that are paused until a client reads", lambda s: s.num_parked
    ),
    _counter(
        "evicted_sessions",
        "Sessions that left memory for the store",
        lambda s: s.evicted_sessions_total,
    ),
    _counter(
        "preemptions",
        "Times that a request made room for one that waited",
        lambda s: s.preemptions_total,
    ),
    _gauge("prefix_entries", "States of prompts that are kept", lambda s: s.prefix_entries),
    _Family(
        CounterMetricFamily,
        "everstream_prefix_lookups",
        "Prompts looked for among them",
        "result",
        {
            "hit": lambda stats: stats.prefix_hits_total,
            "miss": lambda stats: stats.prefix_misses_total,
        },
    ),
    _counter(
        "prefix_saved_tokens",
        "Prompt tokens whose state came from the prefix cache",
        lambda s: s.prefix_saved_tokens_total,
    ),
    _gauge("queue_requests", "Requests that wait for the engine", lambda s: s.num_waiting),
    _gauge("running_requests", "Requests that compute", lambda s: s.num_running),
    _counter(
        "expired_sessions", "Sessions whose idle time was over", lambda s: s.expired_sessions_total
    ),
)
