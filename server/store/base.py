"""What the server asks of a store of sessions, what it gets back, and what can go wrong."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from model.tensor_spec import POSITION_BLOCK
from server.engine.session import Entry, Record, SessionValue
from server.engine.types import Finished, TokenEvent
from server.errors import RequestError

# -------------------------------------------------------------------------------------------------
# What can go wrong between a session and its store, each with a stable code.


class StoreError(RequestError):
    """The store cannot do this. A commit that fails changes nothing.

    ``detail`` is for the operator: it may name files, hosts and users. `str` includes it;
    ``message``, which clients get, does not.
    """

    code = "store_failed"

    def __init__(self, message: str, param: str | None = None, detail: str = "") -> None:
        super().__init__(message, param)
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.message}: {self.detail}" if self.detail else self.message


class StoreFull(StoreError):
    """There is no room for another record; it may come back."""

    code = "store_full"


class StoreFailed(StoreError):
    """The disk or the file system reported an error; the next call begins with a recovery."""

    code = "store_failed"


class StoreLost(StoreError):
    """The store came back without this session: its directory was emptied or replaced."""

    code = "store_lost"


class RecordRefused(StoreError):
    """The database refuses the records of one session; other sessions are not affected."""

    code = "record_refused"

    def __init__(self, reason: Exception) -> None:
        super().__init__(f"the session store does not take this: {brief(reason)}")


class SessionBroken(StoreError):
    """The session is in quarantine: part of its log cannot be read or stored."""

    code = "session_broken"

    def __init__(
        self,
        message: str = "the session cannot continue: part of its log is unusable",
        param: str = "session",
    ) -> None:
        super().__init__(message, param)


class Fenced(StoreError):
    """Another process has taken over the store; this one must neither write nor send."""

    code = "store_taken"


class StoreInUse(StoreError):
    """Another process has the store and is alive."""

    code = "store_in_use"


class HeldElsewhere(StoreError):
    """Another replica holds the session, the one with the key ``replica``."""

    code = "session_elsewhere"

    def __init__(self, replica: int) -> None:
        super().__init__("another replica has the session and does not answer; try again")
        self.replica = replica


class StoreTooNew(StoreError):
    """A newer version of everstream has written this store."""

    code = "store_too_new"


class SnapshotMismatch(StoreError):
    """The state belongs to other weights, another tokenizer, dtype, backend or layout."""

    code = "snapshot_mismatch"


class SnapshotBroken(StoreError):
    """A state file is not what was written: missing, truncated or altered."""

    code = "snapshot_broken"


class ImportRefused(StoreError):
    """A file that cannot be imported."""

    code = "import_refused"

    def __init__(self, message: str) -> None:
        super().__init__(message, "file")


class HistoryGone(StoreError):
    """The requested part of the log is no longer kept."""

    code = "history_gone"


def brief(error: Exception) -> str:
    """The first line of an error, as plain ASCII and short: it may quote what caused it."""
    return ascii(str(error).strip().partition("\n")[0][:200])[1:-1]


# -------------------------------------------------------------------------------------------------
# The few operations on files that a store needs, so that a test can let each of them fail.


Chunk = bytes | memoryview

#: Errors of a disk, or of a quota, that has no room left.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Files(Protocol):
    """Each raises `OSError`."""

    def write(self, path: Path, chunks: Sequence[Chunk]) -> None:
        """A new file of ``chunks``, or a new content of an old one."""

    def allocate(self, path: Path, num_bytes: int) -> None:
        """A new file of zeros that takes up ``num_bytes`` of the disk."""

    def sync(self, path: Path) -> None:
        """What was written is on the disk when this returns."""

    def rename(self, path: Path, to: Path) -> None:
        """Atomic: an open of ``to`` sees the old file or the new one."""

    def sync_dir(self, path: Path) -> None:
        """The names in a directory are on the disk when this returns."""

    def unlink(self, path: Path) -> None:
        """Removes a file."""

    def read(self, path: Path) -> bytes:
        """The whole file. Raises `OSError` for a symbolic link too."""


class DiskFiles:
    """The file system itself."""

    def write(self, path: Path, chunks: Sequence[Chunk]) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(create(path), "wb", buffering=0) as file:
            for chunk in chunks:
                left = memoryview(chunk)
                while left:
                    left = left[file.write(left) :]

    def allocate(self, path: Path, num_bytes: int) -> None:
        with os.fdopen(create(path), "wb", buffering=0) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            else:
                file.write(bytes(num_bytes))

    def sync(self, path: Path) -> None:
        _sync(path, os.O_RDWR)

    def rename(self, path: Path, to: Path) -> None:
        path.rename(to)

    def sync_dir(self, path: Path) -> None:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def read(self, path: Path) -> bytes:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return file.read()


def replace(files: Files, path: Path, chunks: Sequence[Chunk], is_synced: bool) -> None:
    """Replaces a file atomically. The new name is durable when the folder has been synced."""
    new = path.with_suffix(".new")
    try:
        files.write(new, chunks)
        if is_synced:
            files.sync(new)
        files.rename(new, path)
    except BaseException:
        with suppress(OSError):  # it is found when leftovers are looked for
            files.unlink(new)
        raise


def create(path: Path) -> int:
    """A descriptor of an empty file that only its owner may read, whatever its folder allows."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


def make_private(path: Path) -> None:
    """Makes the file if it is missing; takes the rights of others to it.

    An existing file is not opened: to close it would free the locks that SQLite holds in
    this process.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        with suppress(PermissionError):  # another user's file, which this one may use
            path.chmod(0o600)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -------------------------------------------------------------------------------------------------
# One thread calls it, and every call blocks until it is done. What `Store.commit`
# has returned from is in the log for good, so that it may be sent.


#: The fields of an `Identity` that are numbers.
NUMBERS = ("state_bytes", "group_bytes", "context")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a state belongs to: a session continues from it only if its `labels` are equal.

    ``dtype`` is that of the weights, ``state_dtype`` that of the sums in a state. ``layout`` is a
    digest of the shapes and order of the parts of a state. Without a past it has ``state_bytes``
    bytes. One with a bounded past of ``context`` positions has ``group_bytes`` more for each
    `POSITION_BLOCK` of them that it has seen.
    """

    model: str
    tokenizer: str
    backend: str
    dtype: str
    state_dtype: str = field(default="float32", kw_only=True)
    state_bytes: int
    layout: str
    group_bytes: int = 0
    past: str = "stop"
    context: int = 0

    @property
    def labels(self) -> dict[str, str]:
        """The fields that decide what a state means, as strings.

        A bound at which texts stop is not among them: a state is the same for all of them.
        """
        named = {field.name: str(getattr(self, field.name)) for field in fields(self)}
        if not self.group_bytes:
            del named["group_bytes"]
        if self.past == "stop":
            del named["past"], named["context"]
        if self.state_dtype == "float32":
            del named["state_dtype"]
        return named

    @classmethod
    def of(cls, about: Mapping[str, str]) -> Identity:
        """The one with these labels, of which there may be others. Raises KeyError, ValueError."""
        texts = {field.name: about[field.name] for field in fields(cls) if field.name in about}
        numbers = {name: int(texts[name]) for name in NUMBERS if name in texts}
        try:
            return cls(**{**texts, **numbers})  # type: ignore[arg-type]
        except TypeError as error:
            raise KeyError("a label is missing") from error

    def used_bytes(self, position: int) -> int:
        """Of a state that has seen ``position`` tokens: see `model.state.StateLayout`."""
        seen = min(position, self.context) if self.context else position
        return self.state_bytes + self.group_bytes * -(-seen // POSITION_BLOCK)

    @property
    def max_bytes(self) -> int:
        """Of a state with as much of a past as it may have."""
        return self.used_bytes(self.context)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A session's value at a snapshot, and the entries after it, in order.

    Among ``entries`` are `Accepted`, `TokenEvent`, `Finished` and `Rewound` alone;
    the value of a `Rewound` has no state here.
    """

    value: SessionValue
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Keyed:
    """The request that came under a client's key, and how it ended, once it has.

    The session had ``first_seq`` events and ``length`` tokens before it;
    ``is_append`` where it only fed tokens. ``note`` is the request's, as long as
    there is its session.
    """

    session: str
    request_id: str
    first_seq: int
    length: int
    finished: Finished | None
    is_append: bool
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """A session in a list. ``unfinished``: its last request has not ended."""

    id: str
    owner: str
    epoch: int
    length: int
    seq: int
    unfinished: bool
    stored_bytes: int


Found = list[Listed]
Events = list[TokenEvent | Finished]
#: Entries of a session's log with their numbers, which count up by one.
Numbered = list[tuple[int, Entry]]


class Store(Protocol):
    """Keeps sessions. Owned by one thread."""

    @property
    def store_id(self) -> str:
        """Random hex digits, made with the store: another id is another history."""

    @property
    def durable(self) -> bool:
        """Whether sessions can be evicted to it."""

    def commit(self, records: Sequence[Record]) -> None:
        """Adds records, in order. A state may reach the disk later than its `Saved`.

        Raises `StoreFull`, `StoreFailed`, `Fenced`, `StoreLost` (records of a session that
        the store does not have) or `RecordRefused` (something that the database does not take),
        and then none of the records counts. The last two are for one of the sessions alone.
        """

    def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
        """The newest valid snapshot that leads to ``at`` tokens of text, and what came after it.

        The entries lead to the present, or at least past ``at`` tokens of text, where those of the
        value, which then was within a prompt, are not more already.
        Raises `SessionNotFound` (unknown, deleted or another owner's), `SessionBroken`,
        `SnapshotMismatch`, `SnapshotBroken` or `HistoryGone`.
        """

    def read(self, session: str, owner: str, after_seq: int, max_events: int) -> Events:
        """The events after ``after_seq`` that count in ``seq``, at most ``max_events``.

        Raises `SessionNotFound`, `SessionBroken` or `HistoryGone`.
        """

    def discard(self, session: str, owner: str) -> None:
        """Deletes a session in quarantine. Raises `SessionNotFound`."""

    def entries(self, session: str, owner: str, place: int, max_entries: int) -> Numbered:
        """The log's entries from number ``place`` on, or from the first one that is kept.

        Raises `SessionNotFound` or `SessionBroken`.
        """

    def log_end(self, session: str, owner: str) -> int:
        """The number that the next entry of the log gets. Raises as `entries` does."""

    def find_key(self, owner: str, key: str) -> Keyed | None:
        """The request that came under ``key``, also where its session is gone by now."""

    def list(self, owner: str | None, after: str | None, limit: int) -> Found:
        """Sessions by id, beginning after ``after``; of every owner where None is given."""

    def unfinished(self) -> Sequence[tuple[str, str]]:
        """(session, owner) of each session whose last request has not ended."""

    def stored_bytes(self, owner: str) -> int:
        """Bytes of the sessions of ``owner``."""

    def named_states(self) -> dict[str, str]:
        """The digest of each named state by its name. No session depends on them."""

    def read_named(self, name: str) -> bytes | None:
        """The file of a named state, if there is one."""

    def put_named(self, name: str, digest: str, parts: Sequence[Chunk]) -> None:
        """Stores the file of a named state durably, and replaces one of the same name.

        Raises `StoreFull` or `StoreFailed`; then the old one is still there.
        """

    def drop_named(self, name: str) -> bool:
        """Deletes a named state; whether there was one."""

    def maintain(self, now_s: float) -> bool:
        """Retention, pruning, syncing, heartbeat: about once a second, ``now_s`` monotonic.

        Returns whether there is more to do, for which it is to be called again soon.
        Raises what `commit` raises.
        """

    def forget(self) -> None:
        """The engine has discarded all of its sessions, after a commit that failed."""

    def close(self) -> None:
        """Writes what is pending and closes the store."""
