"""A peer that takes something is slow; one that takes nothing is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from server.http.protocols import HttpProtocol, StallTimer
from tests.server.harness import running
from tests.server.http.test_http_protocol import deaf_client, post


class Transport:
    """What waits in it is set by the test; ``check`` is due when the time is over.

    It is the event loop of the timer too.
    """

    def __init__(self, num_unsent: int) -> None:
        self.num_unsent, self.is_aborted = num_unsent, False
        self.check: Callable[[], None] | None = None

    def timer(self) -> StallTimer:
        loop = cast(asyncio.AbstractEventLoop, self)
        return StallTimer(cast(asyncio.Transport, self), 20.0, loop)

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def abort(self) -> None:
        self.is_aborted = True

    def cancel(self) -> None:
        self.check = None

    def call_later(self, delay_s: float, check: Callable[[], None]) -> Any:
        self.check = check
        return self

    def pass_time(self, num_unsent: int) -> None:
        self.num_unsent = num_unsent
        check, self.check = self.check, None
        assert check is not None
        check()


async def test_slow_peer_is_left_alone_until_it_takes_nothing() -> None:
    transport = Transport(1000)
    timer = transport.timer()
    timer.start()
    for num_unsent in (999, 500, 1):
        transport.pass_time(num_unsent)
        assert not transport.is_aborted
    transport.pass_time(1)
    assert transport.is_aborted
    assert transport.check is None


async def test_peer_that_has_caught_up_is_not_watched() -> None:
    transport = Transport(1000)
    timer = transport.timer()
    timer.start()
    timer.stop()
    assert transport.check is None
    timer.start()
    assert transport.check is not None


class Hasty(HttpProtocol):
    stall_timeout_s = 0.1


async def test_client_that_does_not_read_its_stream_is_dropped() -> None:
    body = b'{"prompt": "hi", "max_tokens": 100000, "stream": true}'
    async with running(http_protocol=Hasty, user_timeout_ms=600_000) as server:
        client = await deaf_client(server, post(body))
        await server.until_disconnected()
        client.close()
