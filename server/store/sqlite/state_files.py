"""States as files in a folder: written whole, synced, and only then called by their names."""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from server.engine.value import StateBlock
from server.store.base import Identity
from server.store.errors import SnapshotBroken, StoreFailed
from server.store.files import Files, replace
from server.store.state_file import decode_state, encode_state

logger = logging.getLogger(__name__)

DIR_NAME = "snapshots"
#: Names the store whose states are in the folder.
OWNER_NAME = "store"
#: What clients get; the log has more.
FOREIGN_STATES = "the session store has states of sessions that its database does not know"
#: The process has too much open, or too little memory: the file is as good as before.
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def has_states(folder: Path) -> bool:
    """Whether there is any file of a state."""
    return next(folder.glob("*/*.safetensors"), None) is not None


def foreign_states(path: Path) -> str:
    """What to do where the states in ``path`` are not those of its database."""
    return (
        f"{path} has states of sessions that its database does not know: the database was lost or "
        f"replaced. Nothing was changed. Put the right database back, or keep what can be read: "
        f"everstream store salvage {path} NEW_FOLDER. To start again, move {path / DIR_NAME} away"
    )


class StateFiles:
    """Those under ``path``; see `server.store.snapshots.States`."""

    def __init__(self, path: Path, files: Files, identity: Identity, is_full: bool) -> None:
        self._dir, self._files, self._is_full = path / DIR_NAME, files, is_full
        self._identity = identity

    def write(self, states: Sequence[tuple[StateBlock, int]]) -> list[str]:
        """Those that are written together lie together: one sync of a folder is enough."""
        folder = secrets.token_hex(1)
        files = [f"{folder}/{secrets.token_hex(16)}.safetensors" for _ in states]
        try:
            for file, (state, position) in zip(files, states, strict=True):
                data = encode_state(state, self._identity, position)
                replace(self._files, self._dir / file, data, self._is_full)
            if self._is_full and files:
                self._files.sync_dir(self._dir / folder)
                self._files.sync_dir(self._dir)
        except BaseException:
            self.remove(files)
            raise
        return files

    def read(self, name: str, position: int) -> StateBlock:
        try:
            data = self._files.read(self._dir / name)
        except OSError as error:
            if error.errno in _PASSING:
                raise
            raise SnapshotBroken("the state file cannot be read", detail=str(error)) from error
        return decode_state(data, self._identity, position)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._remove(self._dir / name)

    def claim(self, store_id: str, is_new: bool) -> None:
        """Makes the folder that of the store ``store_id``, whose database may be new.

        Raises `StoreFailed` where it has the states of another one: nothing may be deleted.
        """
        try:
            owner = self._files.read(self._dir / OWNER_NAME).decode(errors="replace")
        except FileNotFoundError:
            owner = None
        if owner == store_id:
            return
        if (is_new or owner is not None) and has_states(self._dir):
            raise StoreFailed(FOREIGN_STATES, detail=foreign_states(self._dir.parent))
        replace(self._files, self._dir / OWNER_NAME, [store_id.encode()], self._is_full)
        if self._is_full:
            self._files.sync_dir(self._dir)

    def remove_leftovers(self, used: set[str]) -> None:
        """Removes every file whose name is not in ``used``."""
        for path in self._dir.glob("*/*"):
            if f"{path.parent.name}/{path.name}" not in used:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """What cannot be removed now is found by `remove_leftovers`."""
        try:
            self._files.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("could not remove %s: %s", path, error)
