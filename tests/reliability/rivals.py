"""Two clients that resume one endless session at once: for both proofs 11."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.reliability.servers import eventually
from tests.reliability.streams import End, KeptStream

Pair = tuple[KeptStream, KeptStream]


async def winner_of(pair: Pair, *reads: Callable[[KeptStream], Awaitable[End]]) -> KeptStream:
    """Lets each of ``pair`` read by its own of ``reads``, until one is refused.

    The other one, which is then cancelled, is returned: it has all of its session.
    """

    async def end(read: Callable[[KeptStream], Awaitable[End]], stream: KeptStream) -> KeptStream:
        await read(stream)
        return stream

    running = [
        asyncio.create_task(end(read, stream)) for read, stream in zip(reads, pair, strict=True)
    ]
    (first, *_), _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    refused = await first
    (winner,) = set(pair) - {refused}
    assert refused.ends[-1] == "error", refused.frames[-1]
    refusal = refused.frames[-1]
    assert (refusal["status"], refusal["error"]["code"]) == (409, "session_attached")
    await eventually(lambda: bool(winner.resumed))
    await winner.cancel()
    await asyncio.gather(*running)
    assert winner.is_finished, winner.frames[-1]
    return winner
