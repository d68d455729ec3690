"""Ends a connection whose peer takes nothing of what waits for it."""

from __future__ import annotations

import asyncio


class StallTimer:
    """Aborts ``transport`` when its peer has taken no byte for ``limit_s``.

    A slow peer that takes something in that time is left alone. Between `start` and
    `stop` nothing is written.
    """

    def __init__(self, transport: asyncio.Transport, limit_s: float) -> None:
        self._transport, self._limit_s = transport, limit_s
        self._timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0

    def start(self) -> None:
        """Has no effect where it runs."""
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._num_unsent = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._check)

    def _check(self) -> None:
        if self._transport.get_write_buffer_size() < self._num_unsent:
            self._arm()
        else:
            self._transport.abort()
