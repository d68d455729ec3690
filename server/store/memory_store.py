"""A store in this process's memory: bounded, and gone with the process."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from server.engine.types import Finished, TokenEvent
from server.engine.value import (
    Accepted,
    Deleted,
    Entry,
    Opened,
    Record,
    Rewound,
    Saved,
    SessionValue,
)
from server.errors import SessionNotFound
from server.store.base import Events, Found, Keyed, Listed, Loaded, Numbered
from server.store.codec import running_after
from server.store.errors import HistoryGone, StoreLost
from server.store.files import Chunk
from server.store.history import (
    as_logged,
    events_after,
    length_after,
    num_tokens,
    past,
    superfluous,
)

#: About what an entry of the log takes up.
ENTRY_BYTES = 100
MAX_KEYS = 100_000


class _Snapshot(NamedTuple):
    """``value`` stands before the session's entry of number ``place``."""

    place: int
    value: SessionValue
    age: int


@dataclass(slots=True)
class _Kept:
    """One session: snapshots, oldest first, and the log from entry ``num_dropped`` on."""

    owner: str
    epoch: int
    length: int
    seq: int
    log_seq: int
    used_s: float
    running: str | None = None
    is_away: bool = False
    num_dropped: int = 0
    num_tokens: int = 0
    num_noted_bytes: int = 0
    entries: list[Entry] = field(default_factory=list)
    snapshots: list[_Snapshot] = field(default_factory=list)

    def add(self, entry: Entry, age: int, max_tokens: int, max_snapshots: int) -> None:
        """Brings the session forward by ``entry``."""
        self.running = running_after(entry, self.running)
        self.length = length_after(entry, self.length)
        self.is_away = isinstance(entry, Saved) and entry.evicted
        if not isinstance(entry, Opened | Saved | Deleted):
            self.entries.append(as_logged(entry))
            self.num_tokens += num_tokens(entry)
            self._shorten(max_tokens)
        if isinstance(entry, Accepted | TokenEvent | Finished):
            self.seq = entry.seq
        elif not isinstance(entry, Deleted):
            self.epoch, self.seq = entry.value.epoch, entry.value.seq
            self._save(entry.value, age, max_snapshots)

    def _save(self, value: SessionValue, age: int, max_snapshots: int) -> None:
        place = self.num_dropped + len(self.entries)
        valid = [each for each in self.snapshots if each.value.length <= value.length]
        valid.append(_Snapshot(place, value, age))
        dropped = superfluous([each.value.length for each in valid], max_snapshots)
        self.snapshots = [each for i, each in enumerate(valid) if i not in dropped]

    def _shorten(self, max_tokens: int) -> None:
        """Forgets the older half of a log that is too long, and what leads nowhere then."""
        if self.num_tokens <= max_tokens:
            return
        count = 0
        while self.num_tokens > max_tokens // 2 and count < len(self.entries):
            entry = self.entries[count]
            self.num_tokens -= num_tokens(entry)
            self.log_seq = max(self.log_seq, getattr(entry, "seq", 0))
            count += 1
        del self.entries[:count]
        self.num_dropped += count
        self.snapshots = [each for each in self.snapshots if each.place >= self.num_dropped]

    @property
    def num_bytes(self) -> int:
        """About what the session takes up; a state that several share counts for each."""
        states = (each.value.state for each in self.snapshots)
        num_bytes = ENTRY_BYTES * self.num_tokens + self.num_noted_bytes
        return num_bytes + sum(state.data.nbytes for state in states if state)


class MemoryStore:
    """Keeps sessions as the objects that they are.

    A session's log has at most ``max_log_tokens``. Where states need more than
    ``max_state_bytes``, the oldest go, save the newest of a session that has
    been evicted.
    """

    def __init__(
        self,
        *,
        durable: bool = False,
        max_log_tokens: int = 65_536,
        max_snapshots: int = 4,
        max_state_bytes: int = 256 << 20,
        retention_s: float | None = None,
    ) -> None:
        self.store_id = secrets.token_hex(8)
        self.durable = durable
        self._max_log_tokens, self._max_snapshots = max_log_tokens, max_snapshots
        self._max_state_bytes, self._retention_s = max_state_bytes, retention_s
        self._sessions: dict[str, _Kept] = {}
        self._keys: dict[tuple[str, str], Keyed] = {}
        self._open_keys: dict[str, tuple[str, str]] = {}
        self._noted: dict[str, list[tuple[str, str]]] = {}
        self._named: dict[str, tuple[str, bytes]] = {}
        self._now_s = 0.0
        self._num_saved = self._num_saved_bytes = 0
        self._next_bound_bytes = max_state_bytes

    def commit(self, records: Sequence[Record]) -> None:
        """See `server.store.base.Store.commit`."""
        opened = {id for id, entry in records if isinstance(entry, Opened)}
        for id, entry in records:
            if id not in self._sessions and id not in opened and not isinstance(entry, Deleted):
                raise StoreLost(f"the store has no session {id}")
        for id, entry in records:
            self._apply(id, entry)
        if self._num_saved_bytes > self._next_bound_bytes:
            self._bound_states()

    def load(self, session: str, owner: str, at: int | None = None) -> Loaded:
        """See `server.store.base.Store.load`."""
        kept = self._find(session, owner)
        kept.used_s = self._now_s
        for place, value, _ in reversed(kept.snapshots):
            if at is None or value.length <= at:
                entries = kept.entries[place - kept.num_dropped :]
                return Loaded(value, past(entries, value.length, at))
        raise HistoryGone("the session's state at this point is no longer kept", "at")

    def read(self, session: str, owner: str, after_seq: int, max_events: int) -> Events:
        """See `server.store.base.Store.read`."""
        kept = self._find(session, owner)
        if after_seq < kept.log_seq:
            raise HistoryGone(f"only what came after {kept.log_seq} is kept", "last_seq")
        return events_after(kept.entries, after_seq, max_events)

    def discard(self, session: str, owner: str) -> None:
        """See `server.store.base.Store.discard`: none is in quarantine here."""
        raise SessionNotFound

    def entries(self, session: str, owner: str, place: int, max_entries: int) -> Numbered:
        """See `server.store.base.Store.entries`."""
        kept = self._find(session, owner)
        begin = max(0, place - kept.num_dropped)
        return [*enumerate(kept.entries[begin : begin + max_entries], kept.num_dropped + begin)]

    def find_key(self, owner: str, key: str) -> Keyed | None:
        """See `server.store.base.Store.find_key`."""
        return self._keys.get((owner, key))

    def list(self, owner: str | None, after: str | None, limit: int) -> Found:
        """See `server.store.base.Store.list`."""
        wanted = (
            _listed(id, kept)
            for id, kept in sorted(self._sessions.items())
            if owner in (None, kept.owner) and (after is None or id > after)
        )
        return [*islice(wanted, limit)]

    def unfinished(self) -> Sequence[tuple[str, str]]:
        """See `server.store.base.Store.unfinished`."""
        return [(id, kept.owner) for id, kept in self._sessions.items() if kept.running]

    def stored_bytes(self, owner: str) -> int:
        """See `server.store.base.Store.stored_bytes`."""
        return sum(kept.num_bytes for kept in self._sessions.values() if kept.owner == owner)

    def named_states(self) -> dict[str, str]:
        """See `server.store.base.Store.named_states`."""
        return {name: digest for name, (digest, _) in self._named.items()}

    def read_named(self, name: str) -> bytes | None:
        """See `server.store.base.Store.read_named`."""
        return self._named[name][1] if name in self._named else None

    def put_named(self, name: str, digest: str, parts: Sequence[Chunk]) -> None:
        """See `server.store.base.Store.put_named`."""
        self._named[name] = digest, b"".join(parts)

    def drop_named(self, name: str) -> bool:
        """See `server.store.base.Store.drop_named`."""
        return self._named.pop(name, None) is not None

    def maintain(self, now_s: float) -> bool:
        """See `server.store.base.Store.maintain`."""
        self._now_s = now_s
        if self._retention_s is None:
            return False
        due = now_s - self._retention_s
        for id, kept in list(self._sessions.items()):
            if kept.is_away and kept.used_s <= due and kept.running is None:
                self._delete(id)
        return False

    def forget(self) -> None:
        """See `server.store.base.Store.forget`: what is here stays."""

    def close(self) -> None:
        """See `server.store.base.Store.close`."""
        self._sessions.clear()
        self._keys.clear()
        self._noted.clear()

    # Records

    def _apply(self, id: str, entry: Entry) -> None:
        if isinstance(entry, Deleted):
            self._delete(id)
            return
        if isinstance(entry, Opened):
            new = entry.value
            kept = _Kept(new.owner, new.epoch, new.length, new.seq, new.seq, self._now_s)
            self._sessions[id] = kept
        kept = self._sessions[id]
        kept.used_s = self._now_s
        kept.add(entry, self._num_saved, self._max_log_tokens, self._max_snapshots)
        if isinstance(entry, Opened | Saved | Rewound) and entry.value.state is not None:
            self._num_saved += 1
            self._num_saved_bytes += entry.value.state.data.nbytes
        elif isinstance(entry, Accepted) and entry.request.key is not None:
            self._begin_key(id, (kept.owner, entry.request.key), entry)
        elif isinstance(entry, Finished):
            self._end_key(id, entry)

    def _begin_key(self, id: str, name: tuple[str, str], entry: Accepted) -> None:
        """Keys outlive their sessions: what was done is not done again."""
        request = entry.request
        self._keys.pop(name, None)
        is_append, note = request.sampling is None, request.note
        self._keys[name] = Keyed(
            id, request.request_id, entry.seq, entry.length, None, is_append, note
        )
        self._open_keys[id] = name
        if note is not None:
            self._noted.setdefault(id, []).append(name)
            self._sessions[id].num_noted_bytes += len(note)
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]

    def _delete(self, id: str) -> None:
        self._sessions.pop(id, None)
        self._open_keys.pop(id, None)
        for name in self._noted.pop(id, ()):
            if name in self._keys:
                self._keys[name] = replace(self._keys[name], note=None)

    def _end_key(self, id: str, entry: Finished) -> None:
        name = self._open_keys.pop(id, None)
        if name in self._keys:
            self._keys[name] = replace(self._keys[name], finished=entry)

    def _find(self, session: str, owner: str) -> _Kept:
        kept = self._sessions.get(session)
        if kept is None or kept.owner != owner:
            raise SessionNotFound
        return kept

    def _bound_states(self) -> None:
        """Lets the oldest states go, to an eighth below the bound, so that it is rarely done."""
        saved = [
            (snapshot, kept)
            for kept in self._sessions.values()
            for snapshot in kept.snapshots
            if snapshot.value.state is not None
        ]
        uses = Counter(snapshot.value.state for snapshot, _ in saved)
        num_bytes = sum(state.data.nbytes for state in uses if state is not None)
        goal = self._max_state_bytes * 7 // 8 if num_bytes > self._max_state_bytes else num_bytes
        for snapshot, kept in sorted(saved, key=lambda each: each[0].age):
            state = snapshot.value.state
            is_needed = kept.is_away and snapshot is kept.snapshots[-1]
            if num_bytes <= goal or state is None or is_needed:
                continue
            kept.snapshots.remove(snapshot)
            uses[state] -= 1
            if not uses[state]:
                num_bytes -= state.data.nbytes
        self._num_saved_bytes = num_bytes
        self._next_bound_bytes = max(self._max_state_bytes, num_bytes + num_bytes // 8)


def _listed(id: str, kept: _Kept) -> Listed:
    return Listed(
        id, kept.owner, kept.epoch, kept.length, kept.seq, kept.running is not None, kept.num_bytes
    )
