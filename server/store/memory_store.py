"""A store in this process's memory: bounded, and gone with the process.

The tables are those of the store on disk, in a database in memory, and the states are objects.
There is no journal: nothing can be lost that it would bring back.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from server.engine.session import Record, StateBlock
from server.engine.types import TokenEvent
from server.store.base import Chunk, Identity, RecordRefused
from server.store.codec import UNSTORABLE
from server.store.log import Log, LoggedEntry, pack_row
from server.store.rows import Head, Tables
from server.store.snapshots import SnapshotRow, Snapshots, Unsaved
from server.store.sqlite.database import SqliteDatabase, Upkeep
from server.store.table_store import LocalStore, StoreClock, StoreLimits

MAX_KEYS = 100_000
#: Of states that no other process shall read.
NO_IDENTITY = Identity("", "", "", "", 0, "")
LIMITS = StoreLimits(max_log_tokens=65_536, max_snapshots=4)

_STATES = (
    "SELECT session, key, place, min_length, file, bytes FROM snapshot "
    "WHERE file NOTNULL ORDER BY key"
)
_NEWEST = "SELECT max(key) FROM snapshot GROUP BY session"
#: The keys in the order of their last use.
_KEY_USES = """
    CREATE TABLE key_use (number INTEGER PRIMARY KEY, owner, key, UNIQUE (owner, key));
    CREATE TRIGGER key_begun AFTER INSERT ON request_key BEGIN
        INSERT INTO key_use (owner, key) VALUES (new.owner, new.key);
    END;
    CREATE TRIGGER key_begun_again AFTER UPDATE OF request_id ON request_key BEGIN
        DELETE FROM key_use WHERE owner = new.owner AND key = new.key;
        INSERT INTO key_use (owner, key) VALUES (new.owner, new.key);
    END;
    CREATE TRIGGER key_gone AFTER DELETE ON request_key BEGIN
        DELETE FROM key_use WHERE owner = old.owner AND key = old.key;
    END;
"""
_DROP_KEYS = """
    DELETE FROM request_key WHERE (owner, key) IN (
        SELECT owner, key FROM key_use ORDER BY number
        LIMIT max(0, (SELECT count(*) FROM key_use) - ?)
    )
"""


class MemoryStates:
    """States as the objects that they are. See `server.store.snapshots.States`."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._states: dict[str, StateBlock] = {}

    def write(self, states: Sequence[tuple[StateBlock, int]]) -> list[str]:
        new = {secrets.token_hex(16): state for state, _ in states}
        self._states |= new
        self.num_bytes += sum(map(self.size, new))
        return [*new]

    def read(self, name: str, position: int) -> StateBlock:
        return self._states[name]

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self.num_bytes -= self.size(name)
            del self._states[name]

    def size(self, name: str) -> int:
        """Bytes of a state."""
        return self._states[name].num_bytes


class MemoryLog(Log):
    """Its newest entries are nowhere but in ``heads``."""

    def _add_row(self, steps: Sequence[LoggedEntry]) -> None:
        """Only tries what clients have written; a token can always be stored."""
        pack_row([step for step in steps if type(step[1]) is not TokenEvent])


class MemoryConnection:
    """What `server.store.sqlite.store.Connection` is, without a directory."""

    def __init__(self, identity: Identity) -> None:
        self.database = SqliteDatabase(None, None, is_full=False)
        self.database.execute(_KEY_USES)
        self.states, self.unsaved = MemoryStates(), Unsaved()
        self.tables = Tables(self.database)
        self.snapshots = Snapshots(self.database, identity, self.states)
        self.snapshots.prepare()
        self.log = MemoryLog(self.database, self.tables, self.snapshots, self.unsaved)


class MemoryUpkeep(Upkeep):
    """Where states need more than ``max_state_bytes``, the oldest go; so do more than ``max_keys``.

    The newest one of a session that has been evicted stays.
    """

    def __init__(
        self,
        connection: MemoryConnection,
        clock: StoreClock,
        limits: StoreLimits,
        max_state_bytes: int,
        max_keys: int,
    ) -> None:
        super().__init__(connection, connection.database, clock, limits)
        self._states, self._max_state_bytes = connection.states, max_state_bytes
        self._max_keys = max_keys

    def _shorten(self, heads: Sequence[Head]) -> None:
        super()._shorten(heads)
        if self._states.num_bytes > self._max_state_bytes:
            self._bound_states()
        self._database.execute(_DROP_KEYS, (self._max_keys,))

    def _bound_states(self) -> None:
        """Drops the oldest states, to an eighth below the bound, so that it is rarely done."""
        found: list[Any] = self._database.execute(_STATES).fetchall()
        uses = Counter(file for *_, file, _ in found)
        num_bytes = sum(map(self._states.size, uses))
        newest = {key for (key,) in self._database.execute(_NEWEST)}
        held = {head.key for head in self._log.heads.values() if head.is_held}
        for session, *columns in found:
            row = SnapshotRow(*columns)
            if num_bytes <= self._max_state_bytes * 7 // 8:
                break
            if row.file is None or (row.key in newest and session not in held):
                continue
            self._log.drop_snapshots(session, [row])
            uses[row.file] -= 1
            if not uses[row.file]:
                num_bytes -= self._states.size(row.file)

    def _needed_entry(self, head: Head, rows: Sequence[SnapshotRow]) -> int:
        """None that is stored: memory is bounded, whatever can be reached without it."""
        save = self._connection.unsaved.get(head.id)
        return head.num_stored if save is None else save.place


class MemoryStore(LocalStore):
    """See `server.store.base.Store` for what is public.

    ``max_state_bytes`` bounds the states of snapshots, ``max_keys`` the keys of requests; see
    `MemoryUpkeep`.
    """

    def __init__(
        self,
        identity: Identity = NO_IDENTITY,
        limits: StoreLimits = LIMITS,
        *,
        durable: bool = False,
        max_state_bytes: int = 256 << 20,
        max_keys: int = MAX_KEYS,
    ) -> None:
        super().__init__()
        self.store_id = secrets.token_hex(8)
        self.durable = durable
        self._connection = MemoryConnection(identity)
        self._upkeep = MemoryUpkeep(
            self._connection, self._clock, limits, max_state_bytes, max_keys
        )
        self._max_state_bytes = self._next_bound_bytes = max_state_bytes
        self._named: dict[str, tuple[str, bytes]] = {}

    @contextmanager
    def _connected(self) -> Iterator[MemoryConnection]:
        yield self._connection

    def commit(self, records: Sequence[Record]) -> None:
        connection = self._connection
        try:
            steps = connection.log.append(records)
        except UNSTORABLE as error:
            raise RecordRefused(error) from error
        connection.log.settle(steps, self._clock.now_s)
        if connection.unsaved.num_bytes + connection.states.num_bytes > self._next_bound_bytes:
            self._upkeep.save()
            num_bytes = connection.states.num_bytes
            self._next_bound_bytes = max(self._max_state_bytes, num_bytes + num_bytes // 8)

    def named_states(self) -> dict[str, str]:
        return {name: digest for name, (digest, _) in self._named.items()}

    def read_named(self, name: str) -> bytes | None:
        return self._named[name][1] if name in self._named else None

    def put_named(self, name: str, digest: str, parts: Sequence[Chunk]) -> None:
        self._named[name] = digest, b"".join(parts)

    def drop_named(self, name: str) -> bool:
        return self._named.pop(name, None) is not None

    def maintain(self, now_s: float) -> bool:
        self._clock.advance(now_s)
        self._upkeep.run(self._touched)
        self._touched = set()
        return bool(self._connection.unsaved.oldest(1))

    def forget(self) -> None:
        """See `server.store.base.Store.forget`: what is here stays."""

    def close(self) -> None:
        self._connection.database.close()
