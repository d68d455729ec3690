"""Snapshots of sessions: a row for each value, and a file for each state, which rows may share."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from server.engine.value import SessionValue, StateBlock
from server.store.base import Identity
from server.store.codec import decode_json, decode_value, encode
from server.store.database import Database
from server.store.errors import SnapshotBroken
from server.store.files import Files
from server.store.state_file import check_identity, decode_state, encode_state, labels

logger = logging.getLogger(__name__)

DIR_NAME = "snapshots"


class Row(NamedTuple):
    """A snapshot without its value; ``place`` is the number of the entry that it stands before."""

    key: int
    place: int
    length: int
    file: str | None
    bytes: int


class Snapshots:
    """Rows of one database, and files under ``path``; transactions are the caller's."""

    def __init__(
        self, path: Path, files: Files, database: Database, identity: Identity, is_full: bool
    ) -> None:
        self._dir, self._files, self._is_full = path / DIR_NAME, files, is_full
        self._execute: Callable[..., Any] = database.execute
        self._identity = identity
        self.identity_key = 0

    # Files

    def file_of(self, state: StateBlock) -> str | None:
        """The file that has the state already."""
        return state.file if state.file is not None and self._is_used(state.file) else None

    def write(self, states: Sequence[tuple[StateBlock, int]]) -> list[str]:
        """New files with states and their positions, durable when this returns, or none.

        Those that are written together lie together, so that one sync of a folder
        is enough.
        """
        folder = secrets.token_hex(1)
        files = [f"{folder}/{secrets.token_hex(16)}.safetensors" for _ in states]
        try:
            for file, (state, position) in zip(files, states, strict=True):
                self._write(self._dir / file, state, position)
            if self._is_full and files:
                self._files.sync_dir(self._dir / folder)
                self._files.sync_dir(self._dir)
        except BaseException:
            self.remove(files)
            raise
        return files

    def _write(self, path: Path, state: StateBlock, position: int) -> None:
        new = path.with_suffix(".new")
        try:
            self._files.write(new, encode_state(state, self._identity, position))
            if self._is_full:
                self._files.sync(new)
            self._files.rename(new, path)
        except BaseException:
            self._remove(new)
            raise

    def remove(self, files: Iterable[str]) -> None:
        """Removes files."""
        for file in files:
            self._remove(self._dir / file)

    def unused(self, files: Iterable[str]) -> list[str]:
        """Those of ``files`` that no row names."""
        return [file for file in files if not self._is_used(file)]

    def remove_leftovers(self) -> None:
        """Removes every file that no row names."""
        used = {file for (file,) in self._execute("SELECT file FROM snapshot WHERE file NOTNULL")}
        for path in self._dir.glob("*/*"):
            if f"{path.parent.name}/{path.name}" not in used:
                self._remove(path)

    def num_bytes(self) -> int:
        """Of all state files."""
        query = "SELECT count(DISTINCT file) FROM snapshot"
        return int(self._execute(query).fetchone()[0]) * self._identity.state_bytes

    def _is_used(self, file: str) -> bool:
        found = self._execute("SELECT 1 FROM snapshot WHERE file = ?", (file,)).fetchone()
        return found is not None

    def _remove(self, path: Path) -> None:
        """What cannot be removed now is found by `remove_leftovers`."""
        try:
            self._files.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("could not remove %s: %s", path, error)

    # Rows

    def prepare(self) -> None:
        """Notes this server's identity, before any `add`."""
        fields = (encode(labels(self._identity)).decode(),)
        self._execute("INSERT OR IGNORE INTO identity VALUES (NULL, ?)", fields)
        query = "SELECT key FROM identity WHERE fields = ?"
        self.identity_key = self._execute(query, fields).fetchone()[0]

    def add(
        self, key: int, place: int, value: SessionValue, file: str | None, identity_key: int
    ) -> int:
        """A row for ``value``, whose state is in ``file``; how many bytes it counts."""
        data = encode(value).decode()
        num_bytes = len(data) + (0 if file is None else self._identity.state_bytes)
        self._execute(
            "INSERT INTO snapshot VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)",
            (key, place, value.length, identity_key, data, file, num_bytes),
        )
        return num_bytes

    def rows(self, key: int) -> list[Row]:
        """Of a session, oldest first."""
        query = (
            "SELECT key, place, length, file, bytes FROM snapshot WHERE session = ? ORDER BY key"
        )
        return [Row(*row) for row in self._execute(query, (key,))]

    def drop(self, rows: Sequence[Row]) -> None:
        """Deletes rows; their files are left to `unused`."""
        for row in rows:
            self._execute("DELETE FROM snapshot WHERE key = ?", (row.key,))

    def newest(self, key: int, at: int | None) -> Iterator[tuple[int, SessionValue]]:
        """Place and value of the valid snapshots of at most ``at`` tokens, newest first.

        Raises `SnapshotMismatch`, and `SnapshotBroken` after the last where one was broken.
        """
        query = (
            "SELECT place, value, file, fields FROM snapshot JOIN identity ON identity.key = "
            "snapshot.identity WHERE session = ? AND length <= ? ORDER BY snapshot.key DESC"
        )
        broken: SnapshotBroken | None = None
        rows = self._execute(query, (key, 1 << 62 if at is None else at)).fetchall()
        for place, value, file, fields in rows:
            check_identity(decode_json(fields), self._identity)
            try:
                yield place, self._value(decode_value(value), file)
            except SnapshotBroken as error:
                logger.error("state file %s: %s; trying the one before it", file, error)
                broken = error
        if broken is not None:
            raise broken

    def read(self, file: str, position: int) -> StateBlock:
        """A state. Raises `SnapshotBroken` and `SnapshotMismatch`."""
        try:
            data = self._files.read(self._dir / file)
        except OSError as error:
            raise SnapshotBroken(f"cannot be read: {error}") from error
        state = decode_state(data, self._identity, position)
        state.file = file
        return state

    def _value(self, value: SessionValue, file: str | None) -> SessionValue:
        return value if file is None else replace(value, state=self.read(file, value.position))
