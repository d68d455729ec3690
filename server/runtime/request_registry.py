"""The live requests of a server: who reads the events of each, and how long its tokens took."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from server.engine.types import Event, Failed, Finished, Migrated, TokenEvent
from server.errors import RequestError
from server.observability.metrics import Metrics
from server.observability.tracing import NO_SPAN, GenerationSpan


class Sink(Protocol):
    """Where the events of a request go: a `server.runtime.event_queue.EventQueue`."""

    def put(self, items: Sequence[Event], /) -> bool: ...
    def fail(self, error: RequestError, /) -> None: ...


@dataclass(slots=True)
class _Live:
    """A request that has not finished: its reader and the times of its latencies.

    ``held_back`` are the events of one whose reader is behind, None for any other.
    """

    sink: Sink
    submitted_s: float
    generation: GenerationSpan
    held_back: list[Event] | None = None
    ttft_s: float | None = None
    last_token_s: float | None = None


class RequestRegistry:
    """Belongs to the event loop. ``idle`` is set while no request is live."""

    def __init__(self, metrics: Metrics) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self._metrics = metrics
        self._live: dict[str, _Live] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def add(
        self,
        request_id: str,
        sink: Sink,
        now: float,
        generation: GenerationSpan = NO_SPAN,
        behind: bool = False,
    ) -> None:
        """With ``behind``, events are held back until `caught_up`."""
        self._live[request_id] = _Live(sink, now, generation, [] if behind else None)
        self.idle.clear()

    def caught_up(self, request_id: str) -> tuple[Sink, list[Event]] | None:
        """The reader has all that came before; returns it, and what was held back."""
        live = self._live.get(request_id)
        if live is None or live.held_back is None:
            return None
        events, live.held_back = live.held_back, None
        return live.sink, events

    def refuse(self, request_id: str, error: RequestError) -> None:
        """Takes a request out that was not accepted."""
        if (live := self._live.get(request_id)) is not None:
            live.generation.failed(error)
            self.forget(request_id)

    def leave(self, request_id: str) -> None:
        """Takes a request out whose reader goes away; its later events are dropped."""
        if (live := self._live.get(request_id)) is not None:
            live.generation.left("detached")
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Takes a request out."""
        self._live.pop(request_id, None)
        if not self._live:
            self.idle.set()

    def requests(self, sink: Sink | None = None) -> list[str]:
        """The ids of the live requests that ``sink`` reads, or of all."""
        return [id for id, live in self._live.items() if sink is None or live.sink is sink]

    def keeping_up(self, sink: Sink) -> list[str]:
        """Those of `requests` whose reader is not behind."""
        return [id for id in self.requests(sink) if self._live[id].held_back is None]

    def fail_all(self, error: RequestError) -> None:
        """Lets every reader see ``error``; no request is live after it."""
        for live in self._live.values():
            live.sink.fail(error)
            live.generation.failed(error)
        self._live.clear()
        self.idle.set()

    def sort(self, events: list[Event], now: float, batches: dict[Sink, list[Event]]) -> None:
        """Adds the events of a step done at ``now`` to their readers' batches, and counts them."""
        gaps: Counter[float] = Counter()  # few values: most tokens follow one of the last step
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue
            if live.held_back is not None:
                live.held_back.append(event)
                continue
            if type(event) is TokenEvent:
                if live.last_token_s is None:
                    live.ttft_s = now - live.submitted_s
                    self._metrics.ttft.observe(live.ttft_s)
                else:
                    gaps[now - live.last_token_s] += 1
                live.last_token_s = now
            elif type(event) is Finished:
                self._metrics.request_finished(event)
                live.generation.finished(event, live.ttft_s)
                self.forget(event.request_id)
            elif type(event) is Failed:
                self.refuse(event.request_id, event.error)
            elif type(event) is Migrated:
                live.generation.left("migrated")
                self.forget(event.request_id)
            if (batch := batches.get(live.sink)) is None:
                batches[live.sink] = [event]
            else:
                batch.append(event)
        for gap, count in gaps.items():
            self._metrics.inter_token.observe(gap, count)
