"""Idempotency keys of which a replica is about to begin something, so that no other does."""

from __future__ import annotations

from server.store.postgres.database import PostgresDatabase

_CLAIM = (
    "INSERT INTO key_claim VALUES (?, ?, ?) ON CONFLICT (owner, key) DO UPDATE "
    "SET replica = excluded.replica WHERE key_claim.replica = excluded.replica "
    "RETURNING key"
)
_RETURN = "DELETE FROM key_claim WHERE owner = ? AND key = ? AND replica = ?"


class KeyClaims:
    """Those of one replica. Each method is a transaction."""

    def __init__(self) -> None:
        self._unreturned: set[tuple[str, str]] = set()

    def claim(self, database: PostgresDatabase, owner: str, key: str) -> bool:
        """Whether this replica may begin what comes under ``key``: no other is about to."""
        with database.transaction():
            self._unreturned.discard((owner, key))
            return bool(database.execute(_CLAIM, (owner, key, database.me)).fetchall())

    def note_return(self, owner: str, key: str) -> None:
        """What came under the key is in the log, or will never be: for `give_back`."""
        self._unreturned.add((owner, key))

    def give_back(self, database: PostgresDatabase) -> None:
        """All that was noted."""
        if not self._unreturned:
            return
        with database.transaction(synced=False):
            for owner, key in self._unreturned:
                database.execute(_RETURN, (owner, key, database.me))
        self._unreturned.clear()
