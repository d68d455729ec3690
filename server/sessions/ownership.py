"""The sessions that a store shared by several replicas gives to each of them.

`server.cluster.ownership` implements `Ownership` over PostgreSQL, and tells the sessions
of this replica, as `Owned`, what the other replicas ask.
"""

from __future__ import annotations

from typing import Literal, Protocol

from server.engine.types import SessionInfo
from server.errors import SessionAttached
from server.runtime.commands import Absent

#: What happens to the reader that a session has at its owner replica, when another replica
#: asks for it. "ask": the session stays with the reader. "take_over": the reader is cut off.
#: "move": the reader is redirected. "never": the owner replica is not asked.
Handover = Literal["ask", "take_over", "move", "never"]


class AttachedElsewhere(SessionAttached):
    """The session has a reader at its owner replica, where ``info`` describes it."""

    def __init__(self, info: SessionInfo) -> None:
        super().__init__()
        self.info = info


class Owned(Protocol):
    """The sessions of this replica, for the others."""

    async def give(
        self, session: str, owner: str, handover: Handover
    ) -> SessionInfo | Absent | None:
        """Saves the session and releases it; None when that is done.

        `Absent` where this replica's engine has none, and its `SessionInfo` where it stays
        with its reader.
        """

    async def continue_unfinished(self) -> None:
        """Continues what a replica that is gone had not finished."""


class Ownership(Protocol):
    """Which replica has a session. All methods belong to the async engine's event loop."""

    async def start(self, owned: Owned, continues: bool) -> None:
        """Listens to the other replicas from now on, and reclaims those that die.

        ``continues``: what they had not finished continues by itself.
        """

    async def acquire(self, session: str, owner: str, replica: int, handover: Handover) -> None:
        """Asks the owner replica for the session; then the store may load it here.

        Raises `AttachedElsewhere`, and `OwnedElsewhere` where there is no answer.
        """

    async def release(self, session: str) -> None:
        """Gives back a session that the store has loaded here to no purpose."""

    async def claim_key(self, owner: str, key: str) -> bool:
        """Reserves an idempotency key; False where another replica has reserved it."""

    async def release_key(self, owner: str, key: str) -> None:
        """Gives an idempotency key back, after `claim_key`, whatever that has returned."""
