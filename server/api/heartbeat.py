"""Comments in silent streams of server-sent events: proxies close connections without data.

The time is measured in ticks of a timer of the stream, so that a token costs no look at the clock.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from server.api.streaming import DirectWriter
from server.runtime.event_queue import EventQueue

#: To an interval. A comment comes after the whole interval, or up to one tick earlier.
NUM_TICKS = 4


class Heartbeat:
    """While it is entered, the reader of ``event_queue`` is nudged after ``interval_s`` of silence.

    ``direct`` is the writer that the reader takes the events with; 0 disables the nudges.
    """

    def __init__(
        self, interval_s: float, event_queue: EventQueue[Any], direct: DirectWriter
    ) -> None:
        self._tick_s = interval_s / NUM_TICKS
        self._event_queue, self._direct = event_queue, direct
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        if self._tick_s:
            self._arm()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._direct.num_silent_ticks += 1
        if self._direct.num_silent_ticks >= NUM_TICKS:
            self._event_queue.nudge()
        self._arm()
