"""A client that has nothing to do with it: whatever others do, its stream continues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

from tests.reliability.raw_websocket import RawWebSocket, opened

TIMEOUT_S = 120.0


class Bystander:
    """Reads an endless stream; ``times_s`` is when each token came. See `bystander`."""

    def __init__(self, client: RawWebSocket) -> None:
        self.times_s: list[float] = []
        self._client = client
        self._news = asyncio.Condition()

    async def more(self, count: int = 50) -> None:
        """Returns when ``count`` more tokens have come. Raises `TimeoutError`."""
        wanted = len(self.times_s) + count
        async with asyncio.timeout(TIMEOUT_S), self._news:
            await self._news.wait_for(lambda: len(self.times_s) >= wanted)

    def gaps_ms(self, first: int = 0, last: int | None = None) -> list[float]:
        """Between one token and the next, of tokens ``first`` to ``last``, in order of size."""
        times_s = self.times_s[first:last]
        return sorted(1000 * (after - before) for before, after in pairwise(times_s))

    def report(self, what: str, first: int) -> None:
        """Prints how long it waited before and after token ``first``; no test depends on it."""
        alone, beside = self.gaps_ms(0, first), self.gaps_ms(first)
        for name, gaps in (("alone", alone), (what, beside)):
            p99 = gaps[len(gaps) * 99 // 100]
            print(f"between tokens, {name}: p99 {p99:.1f} ms, longest {gaps[-1]:.1f} ms")

    async def read(self) -> None:
        """Reads until cancelled. Every token has the number that is due."""
        await self._client.ask(
            type="generate", request_id="bystander", prompt="hi", max_tokens=10**6, ignore_eos=True
        )
        assert (await self._client.receive_json())["type"] == "started"
        while True:
            frame = await self._client.receive_json()
            assert (frame["type"], frame["seq"]) == ("token", len(self.times_s) + 1), frame
            async with self._news:
                self.times_s.append(time.monotonic())
                self._news.notify_all()


@asynccontextmanager
async def bystander(port: int) -> AsyncIterator[Bystander]:
    """A bystander at work; at the end it has had no error and still gets tokens."""
    async with opened(port) as client:
        other = Bystander(client)
        reading = asyncio.create_task(other.read())
        await _alive(reading, other)
        try:
            yield other
            await _alive(reading, other)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _alive(reading: asyncio.Task[None], other: Bystander) -> None:
    """Waits for tokens, or raises what the reading met."""
    more = asyncio.ensure_future(other.more(10))
    await asyncio.wait({reading, more}, return_when=asyncio.FIRST_COMPLETED)
    if reading.done():
        more.cancel()
        reading.result()
    await more
