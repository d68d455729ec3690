"""What the async engine needs of an owner with limits: see `server.api.auth.tenants`."""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol

Room = Literal["max_running", "max_sessions", "max_stored_bytes"]


class TenantLimits(Protocol):
    """What is kept for a tenant; None is no bound."""

    @property
    def max_running(self) -> int | None: ...
    @property
    def max_sessions(self) -> int | None: ...
    @property
    def max_stored_bytes(self) -> int | None: ...


class TenantAccount(Protocol):
    """An owner with limits: see `server.api.auth.tenants`."""

    @property
    def limits(self) -> TenantLimits: ...
    @property
    def keeping(self) -> asyncio.Lock: ...

    def check_tokens(self) -> None: ...
    def check_room(self, limit: Room, number: int, /) -> None: ...
    def spend(self, num_tokens: int, /) -> None: ...
