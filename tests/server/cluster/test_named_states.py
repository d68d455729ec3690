"""A named state is every replica's, and a session that began with it moves as any other."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from tests.reliability.servers import STUCK_S, ServerProcess
from tests.reliability.test_named_states import (
    admin,
    begin,
    ids,
    model,
    rest,
    state,
    without_state,
)

__all__ = ["model", "state"]


async def test_state_is_shared_by_all_replicas(
    model: Path, state: bytes, database_url: str
) -> None:
    """The replica that runs the session is killed, and the third one continues with it."""
    flags = ("--model", model, "--store", database_url, "--threads", "1")
    with ExitStack() as stack:
        one, two, three = [ServerProcess(*flags) for _ in range(3)]
        for server in (one, two, three):
            stack.enter_context(server)
        assert admin(one, "POST", "?name=system", state)["name"] == "system"
        assert [entry["name"] for entry in admin(three, "GET")["data"]] == ["system"]
        wanted = await without_state(one)
        seen = await begin(two)
        two.kill()
        assert admin(three, "DELETE", "/system") == {"name": "system", "deleted": True}
        async with asyncio.timeout(STUCK_S):
            while (found := await rest(three, seen)) is None:  # until the dead one is known to be
                pass
        assert [*ids(seen), *found] == wanted
        assert admin(one, "GET", "/system") == "state_not_found"
