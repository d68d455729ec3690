"""How many tokens the clients of a run have seen, for faults at a given number."""

from __future__ import annotations

import asyncio

TIMEOUT_S = 240.0


class Odometer:
    """Counts the tokens that all clients of a run have seen."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._waiting: set[str] = set()  # names of clients without a token
        self._goal: int | None = None  # of `hold_at`
        self._changed = asyncio.Condition()

    def wait_for(self, client: str) -> None:
        """``client`` has asked and has no token yet."""
        self._waiting.add(client)

    def hold_at(self, num_tokens: int) -> None:
        """From the token of this number on, a client that sees one reads no more until `release`.

        What has come for it by then is lost: however far the server is ahead, each client has
        seen what the test wants it to have seen.
        """
        self._goal = num_tokens

    async def release(self) -> None:
        async with self._changed:
            self._goal = None
            self._changed.notify_all()

    async def add(self, client: str = "") -> bool:
        """One more token, of the ``client`` that was waited for or of one without a name.

        Returns whether the client was not held.
        """
        async with self._changed:
            self.num_tokens += 1
            self._waiting.discard(client)
            self._changed.notify_all()
            if self._goal is None or self.num_tokens < self._goal:
                return True
            await self._changed.wait_for(lambda: self._goal is None)
            return False

    async def leave(self, client: str) -> None:
        """``client`` reads no more."""
        async with self._changed:
            self._waiting.discard(client)
            self._changed.notify_all()

    async def reach(self, num_tokens: int) -> None:
        """Returns when so many have been seen, and each client that reads has one of them.

        Raises `TimeoutError`.
        """

        def is_reached() -> bool:
            return self.num_tokens >= num_tokens and not self._waiting

        async with asyncio.timeout(TIMEOUT_S), self._changed:
            await self._changed.wait_for(is_reached)
