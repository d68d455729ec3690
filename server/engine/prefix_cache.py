"""States of prompts' beginnings, so that a text which many requests begin with is read once.

An entry is the state after some number of an owner's tokens. What one is worth is the
tokens that it saves, times its uses, for its bytes. The one
that is worth least makes room, by GreedyDual-Size-Frequency (Cherkasova 1998,
"Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
Policy"): the priority of file f is Pr(f) = Clock + Fr(f) Cost(f) / Size(f), here
with an entry's uses as Fr, its tokens as Cost, and its bytes as Size. Clock rises to the
priority of what was evicted last, so that old merit fades.

Each owner's entries lie apart.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from server.engine.prefix import Evicted, Prefix, keys
from server.engine.value import StateBlock

#: Shorter beginnings than this are read again sooner than they are copied.
MIN_TOKENS = 32
#: The first of the powers of two at which a prompt's state is worth keeping.
FIRST_POWER = 128


def boundaries(
    num_tokens: int, grid: tuple[int, ...], start: int = 0, asked: Sequence[int] = ()
) -> tuple[int, ...]:
    """After how many tokens of a prompt to keep its state, ascending, all ``num_tokens`` excluded.

    Powers of two, for others that begin like it, those that are ``asked`` for, and its last
    token but one, for the prompt that comes again, unless one of the others is near enough. The
    prompt begins at position ``start`` of the session. With a ``grid`` each position is lowered
    to a multiple of its largest size: `server.engine.scheduler` says why other positions give
    other bits.
    """
    size = grid[0] if grid else 1
    powers = takewhile(lambda power: power < num_tokens, (FIRST_POWER << n for n in range(64)))
    last = num_tokens - 1
    is_near = any(last - MIN_TOKENS < count <= last for count in asked)
    wanted = [*powers, *(count for count in asked if count <= last), *([] if is_near else [last])]
    found = {count - (start + count) % size for count in wanted}
    return tuple(sorted(count for count in found if count >= MIN_TOKENS))


@dataclass(eq=False, slots=True)
class _Entry:
    """One state. ``priority`` is Pr of the module's formula, ``age`` the moment of its last use."""

    owner: str
    prefix: Prefix
    priority: float
    age: int
    num_uses: int = 1

    def worth(self) -> float:
        """Fr Cost / Size of the module's formula."""
        return self.num_uses * self.prefix.num_tokens / self.num_bytes

    @property
    def num_bytes(self) -> int:
        return self.prefix.block.num_bytes


@dataclass(slots=True)
class _Owned:
    """An owner's entries, and how many there are of each length."""

    entries: dict[bytes, _Entry] = field(default_factory=dict)
    num_of_length: Counter[int] = field(default_factory=Counter)

    def add(self, entry: _Entry) -> None:
        self.entries[entry.prefix.key] = entry
        self.num_of_length[entry.prefix.num_tokens] += 1

    def remove(self, entry: _Entry) -> None:
        num_tokens = entry.prefix.num_tokens
        del self.entries[entry.prefix.key]
        self.num_of_length[num_tokens] -= 1
        if not self.num_of_length[num_tokens]:
            del self.num_of_length[num_tokens]


class PrefixCache:
    """At most ``max_entries`` states of ``max_bytes``, or of any size without it.

    They are shared with those who took them: blocks are immutable.

    Up to ``max_evicted`` evicted entries wait for `take_evicted`, the latest ones;
    beyond that, and so without it, an evicted state is gone. As many new ones wait there.
    """

    def __init__(self, max_entries: int, max_evicted: int = 0, max_bytes: float = math.inf) -> None:
        assert max_entries > 0, max_entries
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self.num_entries = self._num_bytes = 0
        self.num_hits = self.num_misses = 0
        self.saved_tokens_total = 0
        self._owners: dict[str, _Owned] = {}
        self._evicted: deque[Evicted] = deque(maxlen=max_evicted)
        self._inserted: deque[Evicted] = deque(maxlen=max_evicted)
        # One item for each entry. A use raises its entry's priority and leaves the item as it
        # was; that is put right when the item comes to the front.
        self._queue: list[tuple[float, int, _Entry]] = []
        self._clock = 0.0
        self._age = 0

    def lookup(self, owner: str, tokens: Sequence[int], origin: str = "") -> Prefix | None:
        """The longest prefix of ``tokens``, after ``origin``, that is here and leaves one to feed.

        Counts a hit or a miss. Takes about 35 ns for each token, and no more
        than a microsecond for each length that the owner's entries have.
        """
        return self._used(self._longest(owner, tokens, origin))

    def find(self, owner: str, key: bytes) -> Prefix | None:
        """The one of this key, however long it is. Counts a hit or a miss."""
        owned = self._owners.get(owner)
        return self._used(None if owned is None else owned.entries.get(key))

    def insert(self, owner: str, prefix: Prefix, continued: bytes | None = None) -> bool:
        """Keeps ``prefix``, unless it is here; returns whether it is here now.

        It takes the place of the entry whose key is ``continued``, that it was computed from,
        where no other prompt has used that one: the earlier turn of a conversation.
        """
        assert prefix.num_tokens > 0
        block = prefix.block
        entries = self._owners[owner].entries if owner in self._owners else {}
        if prefix.key in entries:
            return True
        if block.num_bytes > self._max_bytes:
            return False
        if not self._has_room(block):
            superseded = None if continued is None else entries.get(continued)
            if superseded is not None and superseded.num_uses <= 2:
                self._supersede(superseded)
        while not self._has_room(block):
            self._evict()
        entry = _Entry(owner, prefix, 0.0, self._next_age())
        entry.priority = self._clock + entry.worth()
        self._owners.setdefault(owner, _Owned()).add(entry)
        heapq.heappush(self._queue, (entry.priority, entry.age, entry))
        self.num_entries += 1
        self._num_bytes += block.num_bytes
        self._inserted.append(Evicted(owner, prefix, kept=True))
        return True

    def take_evicted(self) -> list[Evicted]:
        """What is new since the last call and what was evicted, each oldest first.

        As far as it was to wait. What is new may be among the evicted as well, after itself.
        """
        taken = [*self._inserted, *self._evicted]
        self._inserted.clear()
        self._evicted.clear()
        return taken

    def _used(self, entry: _Entry | None) -> Prefix | None:
        if entry is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self.saved_tokens_total += entry.prefix.num_tokens
        entry.num_uses += 1
        entry.priority = self._clock + entry.worth()
        entry.age = self._next_age()
        return entry.prefix

    def _longest(self, owner: str, tokens: Sequence[int], origin: str) -> _Entry | None:
        """Looks at the short lengths first, because hashing goes that way."""
        owned = self._owners.get(owner)
        if owned is None:
            return None
        lengths = sorted(length for length in owned.num_of_length if length < len(tokens))
        if not lengths:
            return None
        found = map(owned.entries.get, keys(owner, tokens[: lengths[-1]], lengths, origin))
        return next((entry for entry in reversed(list(found)) if entry is not None), None)

    def _has_room(self, block: StateBlock) -> bool:
        fits = self._num_bytes + block.num_bytes <= self._max_bytes
        return fits and self.num_entries < self._max_entries

    def _evict(self) -> None:
        """Takes out the entry of the least priority; among equals the one unused for longest."""
        while True:
            priority, age, entry = self._queue[0]
            if age == entry.age:
                break
            heapq.heapreplace(self._queue, (entry.priority, entry.age, entry))
        heapq.heappop(self._queue)
        self._clock = priority
        self._take_out(entry)

    def _supersede(self, entry: _Entry) -> None:
        """Takes out an entry that is not the one of the least priority."""
        self._queue = [item for item in self._queue if item[2] is not entry]
        heapq.heapify(self._queue)
        self._take_out(entry)

    def _take_out(self, entry: _Entry) -> None:
        owned = self._owners[entry.owner]
        owned.remove(entry)
        if not owned.entries:
            del self._owners[entry.owner]
        self.num_entries -= 1
        self._num_bytes -= entry.num_bytes
        self._evicted.append(Evicted(entry.owner, entry.prefix))

    def _next_age(self) -> int:
        self._age += 1
        return self._age
