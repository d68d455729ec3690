"""The tenants' limits on kept sessions: how many there are, and the bytes that they take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from server.runtime.async_engine import AsyncEngine

R = TypeVar("R")


async def within_quota(
    async_engine: AsyncEngine, owner: str, num_new: int, act: Callable[[], Awaitable[R]]
) -> R:
    """The result of ``act``, which keeps ``num_new`` more sessions. Raises `RateLimited`.

    For an owner with a limit, one at a time, so that each check counts what the previous
    call has made. ``act`` then runs to its end even if its caller is cancelled.
    """
    tenant = async_engine.tenants.get(owner)
    if tenant is None or tenant.limits.max_sessions is None or not num_new:
        await _check(async_engine, owner, num_new)
        return await act()
    async with tenant.keeping:
        await _check(async_engine, owner, num_new)
        acting: asyncio.Future[R] = asyncio.ensure_future(act())
        try:
            return await asyncio.shield(acting)
        except asyncio.CancelledError:
            await asyncio.wait({acting})
            if not acting.cancelled():
                acting.exception()  # retrieved, so that asyncio does not log it
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
