"""Those who follow the logs of sessions: woken together, and reading once for all."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from server.api.auth import Limits, Tenants
from server.engine.session import Deleted
from server.runtime.readers import MAX_FOLLOWERS, MAX_READS, Followers, TooManyFollowers
from tests.waiting import started_task

NEWS = [("sess_1", Deleted())]
#: Longer than any test.
NEVER_S = 3600.0


class Source:
    """Counts how often it is read."""

    def __init__(self) -> None:
        self.num_reads = 0

    async def read(self) -> int:
        self.num_reads += 1
        await asyncio.sleep(0)
        return self.num_reads


async def test_followers_share_a_read_until_they_are_woken() -> None:
    followers, source = Followers(wake_s=0), Source()
    with followers.follow("sess_1", "a") as one, followers.follow("sess_1", "a") as other:
        for number in (1, 2):
            reads = (each.shared("key", source.read, NEVER_S) for each in (one, other, one))
            assert await asyncio.gather(*reads) == [number] * 3
            followers.note(NEWS)
            assert one.changed.is_set()
            assert other.changed.is_set()


async def test_read_of_a_follower_that_leaves_is_still_the_others() -> None:
    followers, source = Followers(), Source()
    with followers.follow("sess_1", "a") as one, followers.follow("sess_1", "a") as other:
        leaving = await started_task(one.shared("key", source.read, NEVER_S))
        leaving.cancel()
        assert await other.shared("key", source.read, NEVER_S) == 1


async def test_old_read_is_repeated_and_few_are_kept() -> None:
    followers, source = Followers(), Source()
    with followers.follow("sess_1", "a") as one:
        assert await one.shared("key", source.read, 0.0) == 1
        assert await one.shared("key", source.read, 0.0) == 2
        for key in range(MAX_READS):
            await one.shared(key, source.read, NEVER_S)
        before = source.num_reads
        assert await one.shared("key", source.read, NEVER_S) == before + 1


async def test_sessions_read_apart_and_are_woken_apart() -> None:
    followers, source = Followers(), Source()
    with followers.follow("sess_1", "a") as one, followers.follow("sess_2", "a") as other:
        assert await one.shared("key", source.read, NEVER_S) == 1
        assert await other.shared("key", source.read, NEVER_S) == 2
        followers.note(NEWS)
        assert (one.changed.is_set(), other.changed.is_set()) == (True, False)


async def test_followers_are_woken_at_most_once_in_their_pause() -> None:
    followers = Followers(wake_s=NEVER_S)
    with followers.follow("sess_1", "a") as follower:
        followers.note(NEWS)
        assert follower.changed.is_set()
        follower.changed.clear()
        followers.note(NEWS)
        assert not follower.changed.is_set()
        followers.end()
        assert follower.changed.is_set()


async def test_news_within_the_pause_wake_after_it() -> None:
    followers = Followers(wake_s=0.001)
    with followers.follow("sess_1", "a") as follower:
        for _ in range(3):
            followers.note(NEWS)
            await follower.changed.wait()
            follower.changed.clear()


async def test_tenant_has_as_many_followers_as_it_may_run_requests() -> None:
    tenants = Tenants(lambda: 0.0)
    tenants.put("a", Limits(max_running=2))
    tenants.put("b", Limits())
    followers = Followers(lambda: tenants)
    with followers.follow("sess_1", "a"):
        with followers.follow("sess_2", "a"):
            with pytest.raises(TooManyFollowers, match="has 2 "), followers.follow("sess_1", "a"):
                pass
            with followers.follow("sess_3", "b"):
                pass
        with followers.follow("sess_1", "a"):  # one has left
            pass


async def test_tenant_without_a_limit_has_the_common_one() -> None:
    followers = Followers()
    with ExitStack() as all:
        for number in range(MAX_FOLLOWERS):
            all.enter_context(followers.follow(f"sess_{number}", "a"))
        with pytest.raises(TooManyFollowers), followers.follow("sess_0", "a"):
            pass
