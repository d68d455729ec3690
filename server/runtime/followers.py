"""Those who follow the logs of sessions without being their readers: woken, and given nothing.

A follower reads the log itself when it is woken, at its own pace: no events are queued for it.
What one has read is there for all who follow the session, until they are woken again. The more
followers an owner has, the less often each is woken, so that all of them take little from others.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from server.engine.value import Record
from server.errors import RequestError
from server.runtime.tenant import TenantAccount

#: Those of a tenant whose ``max_running`` is not limited.
MAX_FOLLOWERS = 256
#: For each of an owner's followers, between two times that one is woken.
WAKE_S = 0.0005
#: Reads of one session that are kept: followers that have caught up ask for the same.
MAX_READS = 4

R = TypeVar("R")


class TooManyFollowers(RequestError):
    """The tenant follows as many sessions as it may."""

    code = "too_many_followers"

    def __init__(self, bound: int) -> None:
        super().__init__(f"this key's tenant has {bound} waiting readers of streams already")


class _Followed:
    """A session: its followers, and what they have read since they were woken, and when."""

    def __init__(self) -> None:
        self.followers: set[Follower] = set()
        self.reads: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._woken_s = -math.inf

    def wake(self, pause_s: float = 0.0) -> None:
        """Wakes all, ``pause_s`` after the last time at the earliest."""
        loop = asyncio.get_running_loop()
        if (due_s := self._woken_s + pause_s) > loop.time():
            self._timer = self._timer or loop.call_at(due_s, self.wake)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._woken_s = None, loop.time()
        self.reads.clear()
        for follower in self.followers:
            follower.changed.set()


class Follower:
    """One of a session's. ``changed`` is set when its log has got longer in this process."""

    def __init__(self, followed: _Followed) -> None:
        self.changed = asyncio.Event()
        self._followed = followed

    async def shared(self, key: Hashable, read: Callable[[], Awaitable[R]], max_age_s: float) -> R:
        """What ``read`` returns: once for all who ask for ``key`` before they are woken again.

        It is read again after ``max_age_s``.
        """
        reads, now_s = self._followed.reads, asyncio.get_running_loop().time()
        began_s, reading = reads.pop(key, (now_s, None))
        if reading is None or now_s - began_s >= max_age_s:
            began_s, reading = now_s, asyncio.ensure_future(read())
        reads[key] = began_s, reading
        if len(reads) > MAX_READS:
            del reads[next(iter(reads))]
        result: R = await asyncio.shield(reading)  # others wait for it too
        return result


class Followers:
    """Belongs to the event loop. Once `end` was called, following is of no use any more.

    ``tenants`` are by owner; one that is not in it has the common bound. See `WAKE_S` for
    ``wake_s``.
    """

    def __init__(
        self,
        tenants: Callable[[], Mapping[str, TenantAccount]] = dict,
        wake_s: float = WAKE_S,
    ) -> None:
        self.has_ended = False
        self._tenants, self._wake_s = tenants, wake_s
        self._of: dict[str, tuple[str, _Followed]] = {}
        self._num = Counter[str]()

    @contextmanager
    def follow(self, session: str, owner: str) -> Iterator[Follower]:
        """One more follower of ``session``. Raises `TooManyFollowers`."""
        tenant = self._tenants().get(owner)
        bound = (tenant and tenant.limits.max_running) or MAX_FOLLOWERS
        if self._num[owner] >= bound:
            raise TooManyFollowers(bound)
        _, followed = self._of.setdefault(session, (owner, _Followed()))
        follower = Follower(followed)
        followed.followers.add(follower)
        self._num[owner] += 1
        try:
            yield follower
        finally:
            self._num[owner] -= 1
            if not self._num[owner]:
                del self._num[owner]
            followed.followers.discard(follower)
            if not followed.followers:
                del self._of[session]

    def note(self, records: Sequence[Record]) -> None:
        """These are in the log now."""
        if self._of:
            for session in {session for session, _ in records} & self._of.keys():
                owner, followed = self._of[session]
                followed.wake(self._num[owner] * self._wake_s)

    def end(self) -> None:
        """Wakes all, as the server is about to stop or its model to be replaced."""
        self.has_ended = True
        for _, followed in self._of.values():
            followed.wake()
