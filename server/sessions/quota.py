"""The tenants' limits on kept sessions: how many there are, and the bytes that they take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from server.runtime.async_engine import AsyncEngine


@asynccontextmanager
async def within_quota(async_engine: AsyncEngine, owner: str, num_new: int) -> AsyncIterator[None]:
    """Checks that the owner may keep ``num_new`` more sessions. Raises `RateLimited`.

    The sessions are made in the body. For an owner with a limit, one body runs at a time, so
    that each check counts what the body before has made, also where that was cancelled.
    """
    tenant = async_engine.tenants.get(owner)
    if tenant is None or tenant.limits.max_sessions is None or not num_new:
        await _check(async_engine, owner, num_new)
        yield
        return
    async with tenant.keeping:
        await _check(async_engine, owner, num_new)
        try:
            yield
        except asyncio.CancelledError:  # the engine may still make what it was asked for
            await async_engine.settled()
            raise


async def _check(async_engine: AsyncEngine, owner: str, num_new: int) -> None:
    tenant = async_engine.tenants.get(owner)
    if tenant is None:
        return
    max_sessions, max_bytes = tenant.limits.max_sessions, tenant.limits.max_stored_bytes
    if max_sessions is not None and num_new:
        kept = await async_engine.ask_store(lambda store: store.list(owner, None, max_sessions))
        tenant.check_room("max_sessions", len(kept) + num_new)
    if max_bytes is not None:
        num_bytes = await async_engine.ask_store(lambda store: store.stored_bytes(owner))
        tenant.check_room("max_stored_bytes", num_bytes + 1)
