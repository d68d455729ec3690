"""The states of a shared store: objects by name, and how none is left over for ever.

A name is noted as garbage before its object is put, and again by a trigger when a row
that names it goes. (Those of prefixes are for `server.distributed.shared_prefixes` to
look after.) When that is due, whatever no row names is deleted; so a crash at
any point leaves nothing behind, and no replica takes away what another has just put.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from server.distributed.database import Database
from server.distributed.objects import Objects
from server.engine.value import StateBlock
from server.store.base import Identity
from server.store.state_file import decode_state, encode_state

#: Much longer than from a put to its row.
DUE_S = 3600
AT_ONCE = 100

_NOTE = (
    "INSERT INTO garbage SELECT unnest(?::text[]), extract(epoch FROM now()) + ? "
    "ON CONFLICT (name) DO UPDATE SET due_s = excluded.due_s"
)
_TAKE = """
    DELETE FROM garbage WHERE name IN (
        SELECT name FROM garbage
        WHERE due_s < extract(epoch FROM now()) AND NOT starts_with(name, 'prefixes/')
        LIMIT ? FOR UPDATE SKIP LOCKED
    ) RETURNING name, EXISTS (SELECT FROM snapshot WHERE file = garbage.name)
"""


class SharedStates:
    """See `server.store.snapshots.States`."""

    def __init__(self, database: Database, objects: Objects, identity: Identity) -> None:
        self._database, self._objects, self._identity = database, objects, identity

    def write(self, states: Sequence[tuple[StateBlock, int]]) -> list[str]:
        """See `server.store.snapshots.States`."""
        if not states:
            return []
        names = [secrets.token_hex(16) for _ in states]
        with self._database.transaction(synced=False):
            self._database.execute(_NOTE, (names, DUE_S))
        with self._database.transaction():
            self._objects.put_all(
                [
                    (name, encode_state(state, self._identity, position))
                    for name, (state, position) in zip(names, states, strict=True)
                ]
            )
        return names

    def read(self, name: str, position: int) -> StateBlock:
        """See `server.store.snapshots.States`."""
        return decode_state(self._objects.get(name), self._identity, position)

    def remove(self, names: Iterable[str]) -> None:
        """The trigger has noted them: another replica may be about to use one."""

    def sweep(self) -> int:
        """Deletes what is due and of no use; returns how many names it has looked at."""
        with self._database.transaction(synced=False):
            found = self._database.execute(_TAKE, (AT_ONCE,)).fetchall()
            self._objects.delete([name for name, is_used in found if not is_used])
        return len(found)

    def close(self) -> None:
        self._objects.close()
