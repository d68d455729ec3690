"""States as bytes: snapshots of sessions in a store, and the files in which states leave it.

All are safetensors files of one tensor: the state that a snapshot's row names, a signed session, a
named state, and the state of a prompt.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, Protocol

import orjson

from server.engine.prefixes import Prefix
from server.engine.session import Origin, SessionValue, StateBlock
from server.store.base import Chunk, Identity, ImportRefused, SnapshotBroken, SnapshotMismatch
from server.store.codec import Malformed, decode_json, decode_value, encode, row_sum
from server.store.rows import Database, Head

# -------------------------------------------------------------------------------------------------
# A state as a file: safetensors with one tensor, and strings that say what it is.
#
# The header is read only as `_pack` writes it, byte for byte, and the checksum
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
    return _seal({"format": FORMAT, **identity.labels, "position": str(position)}, state.data)


def decode_state(file: bytes, identity: Identity, position: int) -> StateBlock:
    """The state, sharing memory with ``file``.

    Raises `SnapshotBroken` where the file is not as it was written, and
    `SnapshotMismatch` where it belongs to something else than ``identity``.
    """
    about, data = _unseal(file, FORMAT, identity)
    if about.get("position") != str(position):
        raise SnapshotBroken(f"it is the state after {about.get('position')} tokens")
    return StateBlock(data)


def _seal(about: Mapping[str, str], data: memoryview) -> list[Chunk]:
    """A file of a tensor and what it is ``about``, with a checksum of both, in parts."""
    return _pack({**about, "checksum": _checksum(about, data)}, data)


def _unseal(file: bytes, form: str, identity: Identity) -> tuple[dict[str, str], memoryview]:
    """What `_seal` was given, the tensor sharing memory with ``file``.

    Raises `SnapshotBroken` where the file is not as it was written or of another ``form``, and
    `SnapshotMismatch` where it belongs to something else than ``identity``.
    """
    about, data = unpack(file)
    if about.get("format") != form:
        raise SnapshotBroken(f"its format is not {form}")
    _check_sum(about, data)
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


def _checksum(about: Mapping[str, str], data: Chunk) -> str:
    """Covers the strings of a header and the tensor, but not the checksum itself."""
    digest = blake2b(orjson.dumps({**about, "checksum": ""}), digest_size=32)
    digest.update(data)
    return digest.hexdigest()


def _check_sum(about: Mapping[str, str], data: Chunk) -> None:
    """Raises `SnapshotBroken`."""
    if not hmac.compare_digest(_checksum(about, data).encode(), about.get("checksum", "").encode()):
        raise SnapshotBroken("its checksum is wrong")


def _pack(about: Mapping[str, str], data: memoryview) -> list[Chunk]:
    """A safetensors file of one tensor of bytes, in parts."""
    tensor = {"dtype": "U8", "shape": [data.nbytes], "data_offsets": [0, data.nbytes]}
    header = orjson.dumps({"__metadata__": about, _TENSOR: tensor})
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little"), header, data]


def unpack(file: bytes) -> tuple[dict[str, str], memoryview]:
    """The strings and the tensor of a file that `_pack` has made. Raises `SnapshotBroken`."""
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
    if b"".join(_pack(about, data)[:2]) != file[: 8 + size]:
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


# -------------------------------------------------------------------------------------------------
# A session as one signed file, which another server of the same model can continue from.
#
# The file is safetensors: the state, and the session's fields as strings next to it.


SESSION_FORMAT = "everstream-session-1"
#: Bytes besides the state: much of a text that the state has not seen yet has room in them.
MAX_ABOUT_BYTES = 16 << 20
_MAX_UNDECODED_BYTES = 16


def export_session(value: SessionValue, identity: Identity, key: bytes) -> bytes:
    """The session without the request that it runs, signed with ``key``."""
    data = b"" if value.state is None else value.state.data
    fields = encode(replace(value, progress=None, state=None)).decode()
    about = {"format": SESSION_FORMAT, **identity.labels, "value": fields}
    about["checksum"] = _checksum(about, data)
    about["signature"] = _signature(about, data, key)
    return b"".join(_pack(about, memoryview(data)))


def import_session(
    data: bytes, identity: Identity, key: bytes, *, trust_unsigned: bool = False
) -> SessionValue:
    """The session of a file that `export_session` has made with the same ``key``.

    With ``trust_unsigned`` the signature may be another one, unless the session's
    text is under a grammar. Its id and owner are
    those that it had: the caller gives it new ones. Raises `ImportRefused`, and
    `SnapshotMismatch` where it belongs to another model than ``identity``.
    """
    if len(data) > identity.max_bytes + MAX_ABOUT_BYTES:
        raise ImportRefused("the file is too large to be a session of this model")
    try:
        about, state = unpack(data)
        if about.get("format") != SESSION_FORMAT:
            raise ImportRefused(f"the file's format is not {SESSION_FORMAT}")
        is_ours = _is_signed(about, state, key)
        if not is_ours and not trust_unsigned:
            raise ImportRefused("the file is not signed with this server's key")
        _check_sum({name: text for name, text in about.items() if name != "signature"}, state)
        check_identity(about, identity)
        value = decode_value(about.get("value", ""))
        if value.constraint is not None and not is_ours:
            raise ImportRefused("a session under a grammar must be signed")
    except (Malformed, SnapshotBroken) as error:
        raise ImportRefused(f"the file is not a session of everstream: {error}") from error
    if not is_possible(value, state.nbytes, identity):
        raise ImportRefused("the file's session is inconsistent: its parts do not fit together")
    if not state.nbytes:
        return value
    return replace(value, state=StateBlock(state))


def _signature(about: Mapping[str, str], data: Chunk, key: bytes) -> str:
    """Covers the strings of the header and the tensor, but not the signature itself."""
    mac = hmac.new(key, orjson.dumps({**about, "signature": ""}), "sha256")
    mac.update(data)
    return mac.hexdigest()


def _is_signed(about: Mapping[str, str], data: Chunk, key: bytes) -> bool:
    given = about.get("signature", "").encode()
    return hmac.compare_digest(_signature(about, data, key).encode(), given)


def is_possible(value: SessionValue, num_bytes: int, identity: Identity) -> bool:
    """Whether an engine could have been at ``value``; its tokens are left to the caller."""
    tokens = [token for segment in value.unfed for token in segment.tokens]
    pending = () if value.pending is None else (value.pending,)
    constrained = () if value.constraint is None else value.constraint.tokens
    return (
        num_bytes == (identity.used_bytes(value.position) if value.has_state else 0)
        and min(value.epoch, value.position, value.seq, value.log_index) >= 0
        and (value.origin is None or 0 <= value.origin.length <= value.length)
        and min((*tokens, *pending, *value.recent, *constrained), default=0) >= 0
        and len(constrained) <= value.length
        and all(
            segment.tokens and (not segment.plan or segment.plan >= len(segment.tokens))
            for segment in value.unfed
        )
        and (value.pending is not None or not value.unfed)
        and len(value.undecoded) <= _MAX_UNDECODED_BYTES
        and value.progress is None
    )


# -------------------------------------------------------------------------------------------------
# A named state: what sessions begin with, and the file that it is kept in.
#
# The file is safetensors as an exported session is, without a signature: who may give states to
# a server is trusted with them. A session's own export can be taken for one.


NAMED_STATE_FORMAT = "everstream-named-state-1"
FORMATS = (NAMED_STATE_FORMAT, SESSION_FORMAT)


@dataclass(frozen=True, slots=True)
class NamedState:
    """``value`` is a session's before its first request: no id, no owner, its `Origin` set.

    ``prompt`` is the text that the state has read, where it was made of one.
    """

    value: SessionValue
    prompt: str = ""

    @property
    def digest(self) -> str:
        """Of the state and the tokens around it, 64 hex digits: the same for the same bits."""
        assert self.value.origin is not None, self.value
        return self.value.origin.digest

    @property
    def num_tokens(self) -> int:
        """Tokens of text that a session has before its first request."""
        return self.value.length


def named_state(value: SessionValue, prompt: str = "") -> NamedState:
    """The state of a session between two requests, for others to begin with.

    Raises `ImportRefused` where there is none, and where the session is within a request.
    """
    if value.state is None:
        raise ImportRefused("the session has read nothing: it has no state")
    if value.unfed or value.constraint is not None or value.progress is not None:
        raise ImportRefused("the session is within a request: a state is taken between two")
    if value.position and value.pending is None:
        raise ImportRefused("the session's last token is missing")
    origin = Origin(_digest(value, value.state), value.length)
    plain = SessionValue(
        id="",
        owner="",
        position=value.position,
        pending=value.pending,
        recent=value.recent,
        undecoded=value.undecoded,
        state=value.state,
        origin=origin,
    )
    return NamedState(plain, prompt)


def tuned_state(block: StateBlock) -> NamedState:
    """A state that has read no token: what state tuning has trained."""
    return named_state(SessionValue("", "", state=block))


def export_state(state: NamedState, identity: Identity) -> list[Chunk]:
    """The file of a state that belongs to ``identity``, in parts."""
    block = state.value.state
    assert block is not None, state
    fields = encode(replace(state.value, state=None)).decode()
    about = {
        "format": NAMED_STATE_FORMAT,
        **identity.labels,
        "value": fields,
        "prompt": state.prompt,
    }
    return _seal(about, block.data)


def about_of(data: bytes) -> dict[str, str] | None:
    """What a file says about itself; None where it is not one of ours."""
    try:
        about, _ = unpack(data)
    except SnapshotBroken:
        return None
    return about if about.get("format") in FORMATS else None


def import_state(data: bytes, identity: Identity) -> NamedState:
    """The state of a file of `export_state`, or of an exported session.

    Raises `ImportRefused`, and `SnapshotMismatch` where it belongs to another model.
    """
    try:
        about, block = unpack(data)
        if about.get("format") not in FORMATS:
            raise ImportRefused(f"the file's format is not {NAMED_STATE_FORMAT}")
        _check_sum({name: text for name, text in about.items() if name != "signature"}, block)
        check_identity(about, identity, "state")
        value = decode_value(about.get("value", ""))
    except (Malformed, SnapshotBroken) as error:
        raise ImportRefused(f"the file is not a state of everstream: {error}") from error
    if not is_possible(value, block.nbytes, identity):
        raise ImportRefused("the file's state is inconsistent: its parts do not fit together")
    if block.nbytes:
        value = replace(value, state=StateBlock(block))
    return named_state(value, about.get("prompt", ""))


def read_any_identity(data: bytes) -> tuple[NamedState, Identity]:
    """The state of a file, checked against what the file itself says it belongs to.

    Raises `ImportRefused`.
    """
    about = about_of(data)
    if about is None:
        raise ImportRefused("the file is not a state of everstream")
    try:
        identity = Identity.of(about)
    except (KeyError, ValueError) as error:
        raise ImportRefused("the file does not say what it belongs to") from error
    return import_state(data, identity), identity


def _digest(value: SessionValue, block: StateBlock) -> str:
    around = (value.position, value.pending, value.recent, value.undecoded.hex())
    digest = blake2b(orjson.dumps(around), digest_size=32)
    digest.update(block.data)
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------------
# A prompt's state as a safetensors file, for the prefix cache's second tiers.


PREFIX_FORMAT = "everstream-prefix-1"


def encode_prefix(prefix: Prefix, identity: Identity) -> list[Chunk]:
    """The file of a prompt's state, in parts."""
    about = {
        "format": PREFIX_FORMAT,
        **identity.labels,
        "num_tokens": str(prefix.num_tokens),
        "position": str(prefix.position),
        "recent": orjson.dumps(prefix.recent).decode(),
    }
    return _seal(about, prefix.block.data)


def decode_prefix(file: bytes, identity: Identity, key: bytes, num_tokens: int) -> Prefix:
    """The prefix of this ``key``, sharing memory with ``file``.

    Raises `SnapshotBroken` where the file is not as it was written, and
    `SnapshotMismatch` where it belongs to something else than ``identity``.
    """
    about, data = _unseal(file, PREFIX_FORMAT, identity)
    if about["num_tokens"] != str(num_tokens):
        raise SnapshotBroken(f"it is the state after {about['num_tokens']} tokens")
    recent = tuple(orjson.loads(about["recent"]))
    return Prefix(key, num_tokens, StateBlock(data), int(about["position"]), recent)
