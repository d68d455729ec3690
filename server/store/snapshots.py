"""Snapshots of sessions: a row for each value, and one state by name, as a file."""

from __future__ import annotations

import dataclasses
import hmac
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, Protocol

import orjson

from server.engine.session import SessionValue, StateBlock
from server.store.base import Chunk, Identity, SnapshotBroken, SnapshotMismatch
from server.store.codec import Malformed, decode_json, decode_value, encode, row_sum
from server.store.rows import Database, Head

# -------------------------------------------------------------------------------------------------
# A state as a file: safetensors with one tensor, and strings that say what it is.
#
# The header is read only as `pack` writes it, byte for byte, and the checksum
# covers the rest, so that a file with any byte altered is refused.


FORMAT = "everstream-state-1"
_TENSOR = "state"
#: The names of all labels.
LABELS = tuple(field.name for field in dataclasses.fields(Identity))
#: What labels are that are not there.
UNSTATED = {"state_dtype": "float32"}
#: No header of ours is longer, whatever a file says about itself.
_MAX_HEADER_BYTES = 64 << 20


def encode_state(state: StateBlock, identity: Identity, position: int) -> list[Chunk]:
    """The file of a state that has seen ``position`` tokens, in parts."""
    return seal({"format": FORMAT, **identity.labels, "position": str(position)}, state.data)


def decode_state(file: bytes, identity: Identity, position: int) -> StateBlock:
    """The state, sharing memory with ``file``.

    Raises `SnapshotBroken` where the file is not as it was written, and
    `SnapshotMismatch` where it belongs to something else than ``identity``.
    """
    about, data = unseal(file, FORMAT, identity)
    if about.get("position") != str(position):
        raise SnapshotBroken(f"it is the state after {about.get('position')} tokens")
    return StateBlock(data)


def seal(about: Mapping[str, str], data: memoryview) -> list[Chunk]:
    """A file of a tensor and what it is ``about``, with a checksum of both, in parts."""
    return pack({**about, "checksum": checksum(about, data)}, data)


def unseal(file: bytes, form: str, identity: Identity) -> tuple[dict[str, str], memoryview]:
    """What `seal` was given, the tensor sharing memory with ``file``.

    Raises `SnapshotBroken` where the file is not as it was written or of another ``form``, and
    `SnapshotMismatch` where it belongs to something else than ``identity``.
    """
    about, data = unpack(file)
    if about.get("format") != form:
        raise SnapshotBroken(f"its format is not {form}")
    check_sum(about, data)
    check_identity(about, identity)
    return about, data


def check_identity(about: Mapping[str, Any], identity: Identity, what: str = "session") -> None:
    """Raises `SnapshotMismatch`, naming the first field of ``what`` that differs."""
    ours = identity.labels
    for name in LABELS:
        default = UNSTATED.get(name)
        here, there = ours.get(name, default), about.get(name, default)
        if there != here:
            raise SnapshotMismatch(
                f"the {what} belongs to another {name}: {str(there or 'none')[:64]},"
                f" and this server has {here or 'none'}",
                what,
            )


def checksum(about: Mapping[str, str], data: Chunk) -> str:
    """Covers the strings of a header and the tensor, but not the checksum itself."""
    digest = blake2b(orjson.dumps({**about, "checksum": ""}), digest_size=32)
    digest.update(data)
    return digest.hexdigest()


def check_sum(about: Mapping[str, str], data: Chunk) -> None:
    """Raises `SnapshotBroken`."""
    if not hmac.compare_digest(checksum(about, data).encode(), about.get("checksum", "").encode()):
        raise SnapshotBroken("its checksum is wrong")


def pack(about: Mapping[str, str], data: memoryview) -> list[Chunk]:
    """A safetensors file of one tensor of bytes, in parts."""
    tensor = {"dtype": "U8", "shape": [data.nbytes], "data_offsets": [0, data.nbytes]}
    header = orjson.dumps({"__metadata__": about, _TENSOR: tensor})
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little"), header, data]


def unpack(file: bytes) -> tuple[dict[str, str], memoryview]:
    """The strings and the tensor of a file that `pack` has made. Raises `SnapshotBroken`."""
    size = int.from_bytes(file[:8], "little")
    if len(file) < 8 or size > min(len(file) - 8, _MAX_HEADER_BYTES):
        raise SnapshotBroken("its header is incomplete")
    data = memoryview(file)[8 + size :]
    try:
        about = orjson.loads(file[8 : 8 + size])["__metadata__"]
    except (ValueError, TypeError, KeyError) as error:
        raise SnapshotBroken("its header is not JSON of ours") from error
    if not isinstance(about, dict) or not all(isinstance(text, str) for text in about.values()):
        raise SnapshotBroken("its header is not strings")
    if b"".join(pack(about, data)[:2]) != file[: 8 + size]:
        raise SnapshotBroken("its header is not as it was written")
    return about, data


# -------------------------------------------------------------------------------------------------
# Until they are on the disk, values wait in memory (`Unsaved`): a lost one costs a replay.


class Save(NamedTuple):
    """A value, before the entry of number ``place`` of its session's log."""

    key: int
    place: int
    value: SessionValue


class Unsaved:
    """The newest value of each session that has one, the oldest first."""

    def __init__(self) -> None:
        self._saves: dict[str, Save] = {}
        self.num_bytes = 0

    def add(self, head: Head, value: SessionValue) -> None:
        """The session is at ``value``, after the entries that it has now."""
        if (before := self._saves.get(head.id)) is not None:  # the new value goes to the end
            self.num_bytes -= _size(before.value)
        self._saves[head.id] = Save(head.key, head.num_entries, value)
        self.num_bytes += _size(value)

    def drop(self, session: str) -> None:
        """The value is on the disk, or no longer needed."""
        save = self._saves.pop(session, None)
        if save is not None:
            self.num_bytes -= _size(save.value)

    def cut(self, head: Head, length: int) -> None:
        """The session was rewound to ``length`` tokens with its last entry."""
        save = self._saves.get(head.id)
        if save is not None and save.place < head.num_entries and save.value.min_length > length:
            self.drop(head.id)

    def get(self, session: str) -> Save | None:
        """The newest of a session."""
        return self._saves.get(session)

    def oldest(self, count: int | None) -> list[Save]:
        """So many, or all."""
        return list(islice(self._saves.values(), count))

    def clear(self) -> None:
        """Drops all values: the store is another one."""
        self._saves.clear()
        self.num_bytes = 0


def _size(value: SessionValue) -> int:
    return 0 if value.state is None else value.state.num_bytes


logger = logging.getLogger(__name__)

_IS_USED = "SELECT 1 FROM snapshot WHERE file = ? LIMIT 1"
_ROWS = "SELECT key, place, min_length, file, bytes FROM snapshot WHERE session = ? ORDER BY key"


class States(Protocol):
    """Where the states themselves are, by names of its own."""

    def write(self, states: Sequence[tuple[StateBlock, int]]) -> list[str]:
        """Names of states with their positions, durable when this returns, or none."""

    def read(self, name: str, position: int) -> StateBlock:
        """A state. Raises `SnapshotBroken` and `SnapshotMismatch`."""

    def remove(self, names: Iterable[str]) -> None:
        """Those that no row names any more. Never fails: what is left over is found later."""


class SnapshotRow(NamedTuple):
    """A snapshot without its value; ``place`` is the number of the entry that it stands before.

    It leads to any text of at least ``min_length`` tokens that the log has from there.
    """

    key: int
    place: int
    min_length: int
    file: str | None
    bytes: int


#: Key of the session, place, shortest text, value and file of a row.
Columns = tuple[int, int, int, str, str | None]


class Snapshots:
    """Rows of one database, whose ``states`` are elsewhere; transactions are the caller's."""

    def __init__(self, database: Database, identity: Identity, states: States) -> None:
        self._execute: Callable[..., Any] = database.execute
        self._identity = identity
        self.states = states
        self.identity_key = 0
        self._labels = encode(identity.labels).decode()

    # States

    def file_of(self, state: StateBlock) -> str | None:
        """The name of the state, if it is kept already."""
        if state.file is None or self._execute(_IS_USED, (state.file,)).fetchone() is None:
            return None
        return state.file

    def unused(self, files: Iterable[str]) -> list[str]:
        """Those of ``files`` that no row names."""
        asked = [(file, self._execute(_IS_USED, (file,))) for file in files]
        return [file for file, found in asked if found.fetchone() is None]

    def used(self) -> set[str]:
        """All that a row names."""
        return {file for (file,) in self._execute("SELECT file FROM snapshot WHERE file NOTNULL")}

    def num_bytes(self) -> int:
        """Of all states."""
        query = (
            "SELECT coalesce(sum(size), 0) FROM (SELECT max(bytes - length(value)) AS size"
            " FROM snapshot WHERE file IS NOT NULL GROUP BY file) AS sizes"
        )
        return int(self._execute(query).fetchone()[0])

    # Rows

    def prepare(self) -> None:
        """Notes this server's identity, before any `add`."""
        fields = (self._labels,)
        self._execute("INSERT INTO identity (fields) VALUES (?) ON CONFLICT DO NOTHING", fields)
        query = "SELECT key FROM identity WHERE fields = ?"
        self.identity_key = self._execute(query, fields).fetchone()[0]

    def add(
        self, key: int, place: int, value: SessionValue, file: str | None, identity_key: int
    ) -> int:
        """A row for ``value``, whose state is in ``file``; how many bytes it counts."""
        data = encode(value).decode()
        fields = self._labels if identity_key == self.identity_key else self._fields(identity_key)
        state_bytes = 0 if file is None else self._identity.used_bytes(value.position)
        num_bytes = len(data) + state_bytes
        self._execute(
            "INSERT INTO snapshot (session, place, min_length, identity, value, file, bytes, sum) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(key, place, value.min_length, identity_key, data, file, num_bytes),
                row_sum(key, place, value.min_length, data, file, fields),
            ),
        )
        return num_bytes

    def rows(self, key: int) -> list[SnapshotRow]:
        """Of a session, oldest first."""
        return self.rows_of([key])[0]

    def rows_of(self, keys: Iterable[int]) -> list[list[SnapshotRow]]:
        """See `rows`; of all sessions in one round trip."""
        asked = [self._execute(_ROWS, (key,)) for key in keys]
        return [[SnapshotRow(*row) for row in found] for found in asked]

    def drop(self, rows: Sequence[SnapshotRow]) -> None:
        """Deletes rows; their files are left to `unused`."""
        for row in rows:
            self._execute("DELETE FROM snapshot WHERE key = ?", (row.key,))

    def newest(self, key: int, at: int | None) -> tuple[int, SessionValue] | None:
        """Place and value of the newest valid snapshot that leads to ``at`` tokens of text.

        Raises `SnapshotMismatch`, and `SnapshotBroken` where the only ones are broken.
        """
        query = (
            "SELECT place, min_length, value, file, fields, sum FROM snapshot LEFT JOIN identity "
            "ON identity.key = snapshot.identity WHERE session = ? AND min_length <= ? "
            "ORDER BY snapshot.key DESC"
        )
        broken: SnapshotBroken | None = None
        rows = self._execute(query, (key, 1 << 62 if at is None else at)).fetchall()
        for place, min_length, value, file, fields, stored in rows:
            try:
                return place, self._value(stored, fields, (key, place, min_length, value, file))
            except SnapshotBroken as error:
                logger.error("snapshot %s: %s; trying the one before it", file, error)
                broken = error
        if broken is not None:
            raise broken
        return None

    def _fields(self, identity_key: int) -> str | None:
        query = "SELECT fields FROM identity WHERE key = ?"
        for (fields,) in self._execute(query, (identity_key,)):
            return str(fields)
        return None

    def _value(self, stored: int, fields: str | None, columns: Columns) -> SessionValue:
        """The value of a row, if it is as it was written; the identity's own row may not be.

        Raises `SnapshotBroken` and `SnapshotMismatch`.
        """
        if stored != row_sum(*columns, self._labels):
            if fields is None or stored != row_sum(*columns, fields):
                raise SnapshotBroken("its row was altered")
            check_identity(decode_json(fields), self._identity)
        *_, text, file = columns
        try:
            value = decode_value(text)
        except Malformed as error:
            raise SnapshotBroken("its value cannot be read") from error
        if file is None:
            return value
        state = self.states.read(file, value.position)
        state.file = file
        return replace(value, state=state)
