"""The live requests of a server: who reads the events of each, and how long its tokens took."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from server.engine.errors import EngineError
from server.engine.types import Event, Finished, TokenEvent
from server.metrics import Metrics


class Sink(Protocol):
    """Where the events of a request go: a `server.outbox.Outbox`."""

    def put(self, items: Sequence[Event], /) -> bool: ...
    def fail(self, error: EngineError, /) -> None: ...


@dataclass(slots=True)
class _Live:
    """A request that has not finished: its reader and the times of its latencies."""

    sink: Sink
    submitted_s: float
    last_token_s: float | None = None


class Readers:
    """Belongs to the event loop. ``idle`` is set while no request is live."""

    def __init__(self, metrics: Metrics) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._metrics = metrics
        self._live: dict[str, _Live] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def add(self, request_id: str, sink: Sink, now: float) -> None:
        self._live[request_id] = _Live(sink, now)
        self.idle.clear()

    def forget(self, request_id: str) -> None:
        """Takes a request out; its later events are nobody's."""
        self._live.pop(request_id, None)
        if not self._live:
            self.idle.set()

    def requests(self, sink: Sink | None = None) -> list[str]:
        """The ids of the live requests that ``sink`` reads, or of all."""
        return [id for id, live in self._live.items() if sink is None or live.sink is sink]

    def fail_all(self, error: EngineError) -> None:
        """Lets every reader see ``error``; no request is live after it."""
        for live in self._live.values():
            live.sink.fail(error)
        self._live.clear()
        self.idle.set()

    def sort(self, events: list[Event], now: float, batches: dict[Sink, list[Event]]) -> None:
        """Adds the events of a step done at ``now`` to their readers' batches, and counts them."""
        gaps: Counter[float] = Counter()  # few values: most tokens follow one of the last step
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue
            if type(event) is TokenEvent:
                if live.last_token_s is None:
                    self._metrics.ttft.observe(now - live.submitted_s)
                else:
                    gaps[now - live.last_token_s] += 1
                live.last_token_s = now
            elif type(event) is Finished:
                self._metrics.request_finished(event)
                self.forget(event.request_id)
            if (batch := batches.get(live.sink)) is None:
                batches[live.sink] = [event]
            else:
                batch.append(event)
        for gap, count in gaps.items():
            self._metrics.inter_token.observe(gap, count)
