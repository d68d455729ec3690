"""Prompts' states that did not fit memory, as files: the prefix cache's second tier.

One folder for each owner, one file for each state. A file that is broken, or
belongs to another model, is removed and was never there. Nothing here is needed:
what is lost is computed again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from server.engine.prefix import Evicted, Prefix, keys
from server.store.base import Identity
from server.store.errors import StoreError
from server.store.files import Files, replace
from server.store.prefix_file import decode_prefix, encode_prefix

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"


class _Place(NamedTuple):
    folder: str
    key: str
    num_tokens: int

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.key}-{self.num_tokens}{SUFFIX}"


class PrefixFiles:
    """At most ``max_bytes`` of files under ``path``; those unused for longest go first.

    For one thread at a time.
    """

    def __init__(self, path: Path, files: Files, identity: Identity, max_bytes: int) -> None:
        self.num_hits = 0
        self._path, self._files, self._identity = path, files, identity
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._places: OrderedDict[_Place, int] = OrderedDict()  # with the sizes of the files
        self._lent: set[_Place] = set()
        for file in sorted(path.glob(f"*/*{SUFFIX}"), key=lambda file: file.stat().st_mtime):
            key, _, num_tokens = file.stem.rpartition("-")
            self._add(_Place(file.parent.name, key, int(num_tokens)), file.stat().st_size)

    def __len__(self) -> int:
        return len(self._places)

    def put(self, evicted: Sequence[Evicted]) -> None:
        """Writes states, each once. Raises `OSError`."""
        for owner, prefix, _ in evicted:
            place = _Place(_folder(owner), prefix.key.hex(), prefix.num_tokens)
            self._lent.discard(place)
            if place in self._places:
                continue
            data = encode_prefix(prefix, self._identity)
            replace(self._files, self._path / place.name, data, is_synced=False)
            self._add(place, sum(memoryview(part).nbytes for part in data))
            while self._num_bytes > self._max_bytes and len(self._places) > 1:
                self._remove(next(iter(self._places)))

    def find(self, owner: str, tokens: Sequence[int], origin: str = "") -> Prefix | None:
        """The state of the longest beginning of ``tokens`` that is here and is not all of them.

        None as well where that one has been given out and not been put back: it is
        in memory then.
        """
        folder = _folder(owner)
        here = {place for place in self._places if place.folder == folder}
        lengths = sorted({place.num_tokens for place in here if place.num_tokens < len(tokens)})
        found = zip(lengths, keys(owner, tokens, lengths, origin), strict=True)
        for num_tokens, key in reversed(list(found)):
            place = _Place(folder, key.hex(), num_tokens)
            if place in self._lent:
                return None
            if place in here and (hit := self._read(place)) is not None:
                self._lent.add(place)
                return hit
        return None

    def named(self, owner: str, key: bytes) -> Prefix | None:
        """The one of this key; None as well where it is in memory, as in `find`."""
        folder, digits = _folder(owner), key.hex()
        place = next((p for p in self._places if (p.folder, p.key) == (folder, digits)), None)
        if place is None or place in self._lent or (hit := self._read(place)) is None:
            return None
        self._lent.add(place)
        return hit

    def _read(self, place: _Place) -> Prefix | None:
        try:
            data = self._files.read(self._path / place.name)
            prefix = decode_prefix(data, self._identity, bytes.fromhex(place.key), place.num_tokens)
        except (OSError, StoreError) as error:
            logger.warning("a cached prompt's state cannot be used: %s", error)
            self._remove(place)
            return None
        self._places.move_to_end(place)
        self.num_hits += 1
        return prefix

    def _add(self, place: _Place, num_bytes: int) -> None:
        self._places[place] = num_bytes
        self._num_bytes += num_bytes

    def _remove(self, place: _Place) -> None:
        self._num_bytes -= self._places.pop(place)
        self._lent.discard(place)
        (self._path / place.name).unlink(missing_ok=True)


def _folder(owner: str) -> str:
    return blake2b(owner.encode(), digest_size=16).hexdigest()
