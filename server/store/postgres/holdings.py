"""Which replica holds a session, and how this one comes to hold it."""

from __future__ import annotations

from contextlib import AbstractContextManager

from server.errors import SessionNotFound
from server.store import reading
from server.store.base import Loaded
from server.store.errors import OwnedElsewhere
from server.store.heads import Head
from server.store.postgres.link import SharedConnection


def held(connection: SharedConnection, session: str, owner: str) -> Head | None:
    """The session, where this replica holds it. Raises `SessionNotFound` for another owner's."""
    head = connection.log.head(session)
    if head is not None and head.owner != owner:
        raise SessionNotFound
    return head


def away(connection: SharedConnection, session: str, owner: str) -> tuple[int | None, Head]:
    """Who holds a session that this replica does not, and how its tables are."""
    found = connection.log.away(session)
    if found is None or found[1].owner != owner:
        raise SessionNotFound
    return found


def holding(connection: SharedConnection) -> AbstractContextManager[None]:
    """A transaction in which what this replica believes to hold is its own."""
    return connection.database.transaction(synced=False)


def taken(
    connection: SharedConnection, session: str, owner: str, at: int | None
) -> tuple[Head, Loaded]:
    """A session of no replica becomes this one's, if it can be loaded. Raises `OwnedElsewhere`."""
    try:
        # The engine continues with it before the next commit: that it is ours must last.
        with connection.database.transaction():
            while (head := connection.log.take(session, owner)) is None:
                holder, _ = away(connection, session, owner)
                if holder is not None:
                    raise OwnedElsewhere(holder)
            return head, reading.loaded(connection, head, at)
    except BaseException:
        connection.log.heads.pop(session, None)
        raise
