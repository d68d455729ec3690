"""An orderly end: new work is refused, sessions are saved, readers are redirected."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from server.api.websocket.sockets import Sockets
from server.models.registry import Models

logger = logging.getLogger("everstream.drain")

CLOSE_TIMEOUT_S = 2
# After a cancel each request still ends at the boundary of a step.
CANCEL_TIMEOUT_S = 2.0
# What saving gets after a second signal: sessions that are not saved are cancelled.
HURRIED_SAVE_S = 2.0


async def drain(models: Models, sockets: Sockets, timeout_s: float, hurry: asyncio.Event) -> bool:
    """Ends all requests; False if the engine did not.

    Sessions that a store keeps are saved at the boundary of a token, and their
    readers get `migrate`. Other requests continue for up to ``timeout_s`` and are cancelled
    then, or as soon as the shutdown is hurried. Sockets get 1012 after their last event.
    """
    logger.info("draining for up to %g s", timeout_s)
    models.begin_drain()
    deadline_s = time.monotonic() + timeout_s
    ended = True
    await _ends(models.retire(), deadline_s, hurry, HURRIED_SAVE_S)
    if not await _ends(models.drained(), deadline_s, hurry):
        models.cancel_all()
        ended = await _ends(models.drained(), time.monotonic() + CANCEL_TIMEOUT_S)
        if not ended:
            logger.error("the engine did not end its requests")
    await sockets.close(CLOSE_TIMEOUT_S)
    return ended


async def _ends(
    work: Coroutine[Any, Any, None],
    deadline_s: float,
    hurry: asyncio.Event | None = None,
    hurried_s: float = 0.0,
) -> bool:
    """Whether ``work`` ends in time; that is ``hurried_s`` at most once the shutdown is hurried."""
    working = asyncio.ensure_future(work)
    hurrying = asyncio.ensure_future((hurry or asyncio.Event()).wait())
    try:
        async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
            await asyncio.wait({working, hurrying}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({working}, timeout=hurried_s)
    except TimeoutError:
        pass
    ended = working.done()
    working.cancel()
    hurrying.cancel()
    return ended
