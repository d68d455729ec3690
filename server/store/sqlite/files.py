"""The files of an embedded store: states of sessions, named states, states of prompts."""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import orjson

from server.engine.prefixes import Evicted, Prefix, keys
from server.engine.session import StateBlock
from server.store.base import (
    Chunk,
    Files,
    Identity,
    SnapshotBroken,
    StoreError,
    StoreFailed,
    replace,
)
from server.store.codec import Malformed, decode_value
from server.store.states import (
    decode_prefix,
    decode_state,
    encode_prefix,
    encode_state,
    read_any_identity,
)

# -------------------------------------------------------------------------------------------------
# States as files in a folder: written whole, synced, and only then called by their names.


logger = logging.getLogger(__name__)

SNAPSHOTS_DIR = "snapshots"
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
        f"replaced. Nothing was changed. Put the right database back or restore a backup. To start "
        f"again, move {path / SNAPSHOTS_DIR} away"
    )


class StateFiles:
    """Those under ``path``; see `server.store.states.States`."""

    def __init__(self, path: Path, files: Files, identity: Identity, is_full: bool) -> None:
        self._dir, self._files, self._is_full = path / SNAPSHOTS_DIR, files, is_full
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


# -------------------------------------------------------------------------------------------------
# The named states of an embedded store: a file for each, in a folder of their own.
#
# A file is whole or it is not there: it is written next to the old one, synced, and then renamed.


NAMED_DIR = "named"
SUFFIX = ".safetensors"
#: Bytes of a header, which has the text of the prompt.
_MAX_HEADER_BYTES = 64 << 20


class NamedFiles:
    """Those in the folder ``path / DIR_NAME``. For one thread, in the one process that has it."""

    def __init__(self, path: Path, files: Files, is_full: bool) -> None:
        self._dir, self._files, self._is_full = path / NAMED_DIR, files, is_full
        self._digests: dict[str, str] | None = None

    def digests(self) -> dict[str, str]:
        """The digest of each state by its name. What cannot be read is logged and left out."""
        if self._digests is None:
            found = ((file.stem, _digest(file)) for file in files_in(self._dir.parent))
            self._digests = {name: digest for name, digest in found if digest is not None}
        return dict(self._digests)

    def read(self, name: str) -> bytes | None:
        """The file of a state, if there is one. Raises `OSError`."""
        if name not in self.digests():
            return None
        return self._files.read(self._place(name))

    def put(self, name: str, digest: str, parts: Sequence[Chunk]) -> None:
        """Stores a state durably, and replaces one of the same name. Raises `OSError`."""
        digests, place = self.digests(), self._place(name)
        self._dir.mkdir(mode=0o700, exist_ok=True)
        replace(self._files, place, parts, self._is_full)
        if self._is_full:
            self._files.sync_dir(self._dir)
            self._files.sync_dir(self._dir.parent)
        self._digests = {**digests, name: digest}

    def remove(self, name: str) -> bool:
        """Whether there was one. Raises `OSError`."""
        digests = self.digests()
        if digests.pop(name, None) is None:
            return False
        self._files.unlink(self._place(name))
        if self._is_full:
            self._files.sync_dir(self._dir)
        self._digests = digests
        return True

    def _place(self, name: str) -> Path:
        return self._dir / f"{name}{SUFFIX}"


def files_in(path: Path) -> list[Path]:
    """Those of the store at ``path``, by name."""
    return sorted((path / NAMED_DIR).glob(f"*{SUFFIX}"))


def broken_named(path: Path) -> Iterator[tuple[Path, str]]:
    """Each file of the store at ``path`` that is not a whole state, and why."""
    for file in files_in(path):
        try:
            read_any_identity(file.read_bytes())
        except OSError as error:
            yield file, str(error.strerror)
        except StoreError as error:
            yield file, error.message


def _digest(path: Path) -> str | None:
    """What the header says; the file itself is checked when it is read."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise Malformed("its header is too large")
            about = orjson.loads(file.read(size))["__metadata__"]
        origin = decode_value(about["value"]).origin
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("the named state %s cannot be read: %s", path, error)
        return None
    return None if origin is None else origin.digest


# -------------------------------------------------------------------------------------------------
# Prompts' states as files: the prefix cache's second tier.
#
# One folder for each owner, one file for each state. A file that is broken, or
# belongs to another model, is removed and was never there. Nothing here is needed:
# what is lost is computed again. So nothing is synced.


#: Of all files where the operator has set nothing, as far as the disk has so much to spare.
DEFAULT_PREFIX_BYTES = 1 << 30
#: They take at most one part of so many of what would be free without them.
FREE_PARTS = 10
#: What memory was given is read again after this time: by then it may have made room.
LENT_S = 600.0


class _PrefixPlace(NamedTuple):
    """A file: the owner's folder, the key in hex digits, the number of tokens."""

    folder: str
    key: str
    num_tokens: int

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.key}-{self.num_tokens}{SUFFIX}"


def default_bytes(free_bytes: int) -> int:
    """What the files may take of ``free_bytes``, which a disk has without them."""
    return min(DEFAULT_PREFIX_BYTES, free_bytes // FREE_PARTS)


class PrefixFiles:
    """At most ``max_bytes`` of files under ``path``; those unused for longest go first.

    Without ``max_bytes`` it is `DEFAULT_PREFIX_BYTES`, or less on a disk that is nearly full.
    What was unused for ``max_age_s`` goes when the next one is written, or at the next start.
    For one thread at a time, but for `may_find` and `may_name`. Raises `OSError` where the folder
    cannot be used.
    """

    def __init__(
        self,
        path: Path,
        files: Files,
        identity: Identity,
        max_bytes: int | None = None,
        max_age_s: float = math.inf,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._files, self._identity = path, files, identity
        self._max_bytes, self._max_age_s, self._clock = max_bytes, max_age_s, clock
        self._num_bytes = 0
        self._sizes: OrderedDict[_PrefixPlace, int] = OrderedDict()
        self._places: dict[str, dict[str, _PrefixPlace]] = {}  # by folder and key
        self._lengths: dict[str, Counter[int]] = {}  # by folder: files of so many tokens
        self._lent: dict[_PrefixPlace, float] = {}
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in path.glob("*/*.new"):
            leftover.unlink(missing_ok=True)
        for place, stat in sorted(self._found(), key=lambda found: found[1].st_mtime):
            self._add(place, stat.st_size)
        self._make_room(0)

    def __len__(self) -> int:
        return len(self._sizes)

    def put(self, evicted: Sequence[Evicted]) -> None:
        """Writes states, each once. Raises `OSError`."""
        for owner, prefix, is_in_memory in evicted:
            place = _PrefixPlace(_folder(owner), prefix.key.hex(), prefix.num_tokens)
            if place in self._sizes:
                self._note_use(place)
            elif not self._write(place, prefix):
                continue
            if is_in_memory:
                self._lent[place] = self._clock()
            else:
                self._lent.pop(place, None)

    def find(self, owner: str, tokens: Sequence[int], origin: str = "") -> Prefix | None:
        """The state of the longest beginning of ``tokens`` that is here and is not all of them.

        None as well where that one has been given out lately and not been put back: it is
        in memory then.
        """
        for place in self._fitting(owner, tokens, origin):
            if self._is_lent(place):
                return None
            if (hit := self._lend(place)) is not None:
                return hit
        return None

    def named(self, owner: str, key: bytes) -> Prefix | None:
        """The one of this key; None as well where it is in memory, as in `find`."""
        place = self._named(owner, key)
        return None if place is None or self._is_lent(place) else self._lend(place)

    def may_find(self, owner: str, tokens: Sequence[int], origin: str = "") -> bool:
        """See `server.sessions.origins.Prefixes`."""
        place = next(self._fitting(owner, tokens, origin), None)
        return place is not None and not self._is_lent(place)

    def may_name(self, owner: str, key: bytes) -> bool:
        """See `server.sessions.origins.Prefixes`."""
        place = self._named(owner, key)
        return place is not None and not self._is_lent(place)

    def _fitting(self, owner: str, tokens: Sequence[int], origin: str) -> Iterator[_PrefixPlace]:
        """The beginnings of ``tokens`` that are here and not all of them, the longest first."""
        folder = _folder(owner)
        here = self._places.get(folder, {})
        lengths = list(self._lengths.get(folder, ()))
        fitting = sorted(length for length in lengths if length < len(tokens))
        if fitting:
            for key in reversed(list(keys(owner, tokens[: fitting[-1]], fitting, origin))):
                if (place := here.get(key.hex())) is not None:
                    yield place

    def _named(self, owner: str, key: bytes) -> _PrefixPlace | None:
        return self._places.get(_folder(owner), {}).get(key.hex())

    def _found(self) -> Iterator[tuple[_PrefixPlace, os.stat_result]]:
        for file in self._path.glob(f"*/*{SUFFIX}"):
            key, _, num_tokens = file.stem.rpartition("-")
            if key and num_tokens.isdecimal():
                with suppress(FileNotFoundError):
                    yield _PrefixPlace(file.parent.name, key, int(num_tokens)), file.stat()

    def _write(self, place: _PrefixPlace, prefix: Prefix) -> bool:
        """False where there is no room for it."""
        data = encode_prefix(prefix, self._identity)
        num_bytes = sum(memoryview(part).nbytes for part in data)
        if not self._make_room(num_bytes):
            return False
        replace(self._files, self._path / place.name, data, is_synced=False)
        self._add(place, num_bytes)
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Removes old files, and more until ``num_bytes`` fit. False if they never do."""
        while self._sizes and self._age_s(oldest := next(iter(self._sizes))) > self._max_age_s:
            self._remove(oldest)
        max_bytes = self._max_bytes
        if max_bytes is None:
            max_bytes = default_bytes(shutil.disk_usage(self._path).free + self._num_bytes)
        if num_bytes > max_bytes:
            return False
        while self._num_bytes + num_bytes > max_bytes:
            self._remove(next(iter(self._sizes)))
        return True

    def _is_lent(self, place: _PrefixPlace) -> bool:
        since_s = self._lent.get(place)
        return since_s is not None and abs(self._clock() - since_s) <= LENT_S

    def _age_s(self, place: _PrefixPlace) -> float:
        """How long it was unused; infinite where it is gone."""
        try:
            return self._clock() - (self._path / place.name).stat().st_mtime
        except OSError:
            return math.inf

    def _lend(self, place: _PrefixPlace) -> Prefix | None:
        try:
            data = self._files.read(self._path / place.name)
            prefix = decode_prefix(data, self._identity, bytes.fromhex(place.key), place.num_tokens)
        except (OSError, StoreError) as error:
            logger.warning("a cached prompt's state cannot be used: %s", error)
            if not (isinstance(error, OSError) and error.errno in _PASSING):
                self._remove(place)
            return None
        self._note_use(place)
        self._lent[place] = self._clock()
        return prefix

    def _note_use(self, place: _PrefixPlace) -> None:
        """Also for the next process, which reads the order from the files."""
        self._sizes.move_to_end(place)
        with suppress(OSError):
            os.utime(self._path / place.name)

    def _add(self, place: _PrefixPlace, num_bytes: int) -> None:
        self._places.setdefault(place.folder, {})[place.key] = place
        self._lengths.setdefault(place.folder, Counter())[place.num_tokens] += 1
        self._sizes[place] = num_bytes
        self._num_bytes += num_bytes

    def _remove(self, place: _PrefixPlace) -> None:
        self._num_bytes -= self._sizes.pop(place)
        self._places[place.folder].pop(place.key, None)
        lengths = self._lengths[place.folder]
        lengths[place.num_tokens] -= 1
        if not lengths[place.num_tokens]:
            del lengths[place.num_tokens]
        self._lent.pop(place, None)
        with suppress(OSError):  # the next process finds it
            (self._path / place.name).unlink()


def _folder(owner: str) -> str:
    return blake2b(owner.encode(), digest_size=16).hexdigest()
