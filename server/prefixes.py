"""The prefix cache's files between the event loop and the engine: it never waits for them.

What the engine puts out is written by a thread of its own. A prompt whose
beginning is on the disk waits for its own file to be read, and nobody else does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from server.driver import Driver
from server.engine.prefix_cache import FIRST_POWER, Evicted
from server.engine.types import Request
from server.store.prefix_files import PrefixFiles

logger = logging.getLogger("everstream.prefixes")


class PrefixTier:
    """Belongs to the event loop. ``bos_token_id`` begins a text in an empty session."""

    def __init__(self, driver: Driver, files: PrefixFiles, bos_token_id: int) -> None:
        self._driver, self._files = driver, files
        self._bos_token_id = bos_token_id
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefixes")
        driver.on_evicted_prefixes = self._put

    async def fetch(self, request: Request) -> None:
        """Brings the beginning of the request's prompt back to the engine, if it is on the disk."""
        if request.session is not None or len(request.tokens) < FIRST_POWER or request.score:
            return
        text = ((self._bos_token_id,) if request.start else ()) + request.tokens
        loop = asyncio.get_running_loop()
        hit = await loop.run_in_executor(self._thread, self._files.find, request.owner, text)
        if hit is not None:
            beginning, block = text[: hit.num_tokens], hit.block
            await self._driver.call(
                lambda engine, now: engine.insert_prefix(request.owner, beginning, block)
            )

    def close(self) -> None:
        """Writes what is outstanding."""
        self._thread.shutdown()

    def _put(self, evicted: Sequence[Evicted]) -> None:
        self._thread.submit(self._write, list(evicted))

    def _write(self, evicted: Sequence[Evicted]) -> None:
        try:
            self._files.put(evicted)
        except OSError as error:
            logger.warning("a prompt's state was not kept: %s", error)
