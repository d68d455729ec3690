"""An answer that watches its client gives back what it asked for, however it ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.types import Message, Scope, Send

from server.api.answers import WatchedAnswer
from tests.waiting import started_task


class Stubborn(WatchedAnswer):
    """Its work ends a while after it is cancelled."""

    def __init__(self, service: Any) -> None:
        super().__init__(service)
        self.is_cancelled, self.may_end = asyncio.Event(), asyncio.Event()

    async def _answer(self, scope: Scope, send: Send) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelled.set()
            await self.may_end.wait()


async def connected() -> Message:
    """The client stays."""
    await asyncio.Event().wait()
    raise AssertionError


async def test_reader_is_released_where_the_answer_is_cancelled_twice() -> None:
    requests = Mock()
    service = SimpleNamespace(
        async_engine=SimpleNamespace(requests=requests),
        sessions=None,
        keys=None,
        heartbeat_s=0,
        max_queued_events=9,
    )
    answer = Stubborn(service)
    running = await started_task(answer({}, connected, Mock()))
    running.cancel()
    await answer.is_cancelled.wait()
    requests.release.assert_not_called()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    requests.release.assert_called_once()
    answer.may_end.set()
