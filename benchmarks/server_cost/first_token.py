"""The time to the first token around a model that costs nothing: what the server itself takes."""

from __future__ import annotations

import asyncio
import time

from benchmarks.report import Figures
from benchmarks.serve.load import percentile_ms
from benchmarks.wire import Opening, connect

NUM_WARM_UP = 20


class FirstToken(asyncio.Protocol):
    """Sends ``opening``; ``seconds`` is done once ``mark`` arrives, which every token has.

    The time begins where the message is written that asks for tokens, on an open connection.
    """

    def __init__(self, opening: Opening) -> None:
        self.seconds: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._opening, self._rest, self._received = opening, opening.rest, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._write(self._opening.head)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            rest, self._rest = self._rest, b""
            self._write(rest)
            return
        self._received += data
        if self._opening.mark in self._received and not self.seconds.done():
            self.seconds.set_result(time.perf_counter() - self._asked_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.seconds.done():
            self.seconds.set_exception(ConnectionError(f"no token: {self._received[:500]!r}"))

    def abort(self) -> None:
        """Ends the connection without a word."""
        self._transport.abort()

    def _write(self, data: bytes) -> None:
        self._asked_s = time.perf_counter()
        self._transport.write(data)


async def first_tokens(port: int, opening: Opening, num: int) -> Figures:
    """Of ``num`` requests one after the other, each on a connection of its own."""
    seconds = []
    for _ in range(NUM_WARM_UP + num):
        probe = FirstToken(opening)
        await connect(probe, port)
        seconds.append(await probe.seconds)
        probe.abort()
    measured = seconds[NUM_WARM_UP:]
    return {f"p{rank}_ms": percentile_ms(measured, rank) for rank in (50, 99)}
