"""Who owns sessions: tenants, what each may have, and what each has at this moment.

All but `Tenant.check_room` belongs to the event loop. Time is passed in as a clock.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from server.api.auth.keys_file import Limits
from server.errors import RequestError

Clock = Callable[[], float]

#: Of a rate limit.
PERIOD_S = 60.0
# Waits are stated in whole milliseconds; the margin is far above the error of the sums.
_MARGIN_S = 1e-6

# What ends when a client decides so has no exact time.
SOON_S = 1.0

#: Limits on how many there are, or how much, at one moment.
Room = Literal["max_running", "max_connections", "max_sessions", "max_stored_bytes"]


class RateLimited(RequestError):
    """The tenant has used up what it may have for now; in ``retry_after_s`` there is some."""

    code = "rate_limited"

    def __init__(self, limit: str, retry_after_s: float) -> None:
        super().__init__(f"the limit {limit} of this key's tenant is reached")
        self.retry_after_s = retry_after_s


class Bucket:
    """How much may be used in a minute: it fills steadily, begins full, and may go below zero.

    The generic cell rate algorithm: all that is kept is the moment at which the bucket
    will be full again.
    """

    def __init__(self) -> None:
        self._full_at_s = -math.inf

    def wait_s(self, now: float, per_minute: int) -> float:
        """Seconds until one unit is there, 0 where it is; after that wait it is there."""
        missing_s = max(0.0, self._full_at_s - now)
        wait_s = missing_s + PERIOD_S / per_minute - PERIOD_S
        if wait_s <= _MARGIN_S / 2:
            return 0.0
        return math.ceil((wait_s + _MARGIN_S) * 1000) / 1000

    def take(self, now: float, amount: int, per_minute: int) -> None:
        """Takes ``amount``, whether or not it is there."""
        self._full_at_s = max(self._full_at_s, now) + amount * PERIOD_S / per_minute


@dataclass
class Tenant:
    """An owner of sessions, with limits that a reload may change under it.

    ``name`` is the owner that the engine knows.
    """

    name: str
    limits: Limits
    clock: Clock
    num_connections: int = 0
    requests_total: int = 0
    refused_total: int = 0
    tokens_total: int = 0
    #: Held from a look at how many sessions there are until there is one more.
    keeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    _requests: Bucket = field(default_factory=Bucket)
    _tokens: Bucket = field(default_factory=Bucket)

    def request(self) -> None:
        """Counts a request or a message; raises `RateLimited` where it is one too many."""
        per_minute = self.limits.requests_per_minute
        if per_minute is not None:
            now = self.clock()
            self._refuse_unless_due("requests_per_minute", self._requests.wait_s(now, per_minute))
            self._requests.take(now, 1, per_minute)
        self.requests_total += 1

    def count(self) -> None:
        """Counts a message that is always handled; the next ones wait for it."""
        if (per_minute := self.limits.requests_per_minute) is not None:
            self._requests.take(self.clock(), 1, per_minute)
        self.requests_total += 1

    @contextmanager
    def connection(self) -> Iterator[None]:
        """Holds one of the tenant's connections; raises `RateLimited` where none is left."""
        try:
            self.check_room("max_connections", self.num_connections + 1)
        except RateLimited:
            self.refused_total += 1
            raise
        self.num_connections += 1
        try:
            yield
        finally:
            self.num_connections -= 1

    def check_tokens(self) -> None:
        """Before work that computes: raises `RateLimited` while the token bucket is empty."""
        per_minute = self.limits.tokens_per_minute
        if per_minute is not None:
            wait_s = self._tokens.wait_s(self.clock(), per_minute)
            self._refuse_unless_due("tokens_per_minute", wait_s)

    def spend(self, num_tokens: int) -> None:
        """Counts computed tokens. The bucket may go below zero: the next work waits for it."""
        self.tokens_total += num_tokens
        per_minute = self.limits.tokens_per_minute
        if per_minute is not None:
            self._tokens.take(self.clock(), num_tokens, per_minute)

    def check_room(self, limit: Room, number: int) -> None:
        """Raises `RateLimited` where ``number`` is more than the limit.

        It changes nothing, so it may be called in any thread.
        """
        bound: int | None = getattr(self.limits, limit)
        if bound is not None and number > bound:
            raise RateLimited(limit, SOON_S)

    def _refuse_unless_due(self, limit: str, wait_s: float) -> None:
        if wait_s > 0:
            self.refused_total += 1
            raise RateLimited(limit, wait_s)


class Tenants(dict[str, Tenant]):
    """All tenants by name. One that was there once stays, for what it still has running."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def put(self, name: str, limits: Limits) -> Tenant:
        """The tenant of that name, new or with what it has used so far, under ``limits``."""
        tenant = self.setdefault(name, Tenant(name, limits, self._clock))
        tenant.limits = limits
        return tenant
