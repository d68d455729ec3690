"""What a server asks of others that share its store, where there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from server.engine.types import SessionInfo
from server.errors import RequestError, SessionAttached

if TYPE_CHECKING:
    from server.sessions.sessions import Sessions

#: How a session is wanted of the replica that has it: unless a client reads it there,
#: with its reader being cut off, with its reader being told to go on elsewhere, or not at all.
How = Literal["ask", "take_over", "move", "never"]


class KeyInUse(RequestError):
    """The first request under this key is still being accepted."""

    code = "key_in_use"

    def __init__(self) -> None:
        super().__init__("the same idempotency_key is being accepted", "idempotency_key")


class AttachedElsewhere(SessionAttached):
    """A client reads the session at another replica, where it is as ``info`` says."""

    def __init__(self, info: SessionInfo) -> None:
        super().__init__()
        self.info = info


class Peers(Protocol):
    """The other replicas; all methods belong to the async engine's event loop."""

    async def start(self, sessions: Sessions, continues: bool) -> None:
        """From here on others are heard, and those that die are reclaimed.

        ``continues``: what they had not finished goes on by itself.
        """

    async def fetch(self, session: str, owner: str, holder: int, how: How) -> None:
        """Returns when the store may have the session for this replica.

        Raises `AttachedElsewhere`, and `HeldElsewhere` where there is no answer.
        """

    async def release(self, session: str) -> None:
        """Lets go of a session that the store has taken for this replica in vain."""

    async def claim_key(self, owner: str, key: str) -> None:
        """Raises `KeyInUse` where another replica is about to begin under this key."""

    async def give_back_key(self, owner: str, key: str) -> None:
        """After `claim_key`, whatever has come of it."""
