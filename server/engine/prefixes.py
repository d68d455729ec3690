"""States of prompts' beginnings: keys, cache, and prompts fed once for several requests."""

from __future__ import annotations

import heapq
import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple, Self

import numpy as np

from server.engine.request import Live
from server.engine.sampling import MAX_SEED
from server.engine.session import Origin, SessionValue, StateBlock, UnfedSegment
from server.engine.tables import SessionTable
from server.engine.text import TokenArray
from server.engine.types import Request
from server.errors import RequestError, invalid

# -------------------------------------------------------------------------------------------------
# The state after a prompt's beginning, its key, and the handle by which a client names it.
#
# An owner never meets what another one left: the owner is part of every key. So is what the text
# begins with, a named state or another prompt's state.


#: What a handle begins with, for those who find one in a log.
MARK = "prefix_"
#: Of a handle. The state of a prompt is kept at most so near to its end that this is enough.
MAX_HANDLE_CHARS = 1024
_KEY_BYTES = 32


class PrefixNotFound(RequestError):
    """No such prefix, not this owner's, or one that has made room: these look alike on purpose."""

    code = "prefix_not_found"
    message = (
        "prefix: the server does not have it, or has it no more; "
        "send the whole prompt, with return_prefix for a new handle"
    )
    param = "prefix"


class Prefix(NamedTuple):
    """The state ``block`` after the first ``num_tokens`` of a prompt, which ``key`` stands for.

    It has seen ``position`` tokens of the text, ``recent`` last, which penalties look at.
    """

    key: bytes
    num_tokens: int
    block: StateBlock
    position: int
    recent: tuple[int, ...]


class Evicted(NamedTuple):
    """A prefix of ``owner`` that made room.

    Or, ``kept``, one that is still here and is offered to the second tier.
    """

    owner: str
    prefix: Prefix
    kept: bool = False


class PrefixHandle(NamedTuple):
    """A prompt that was read: the ``key`` of a state, and the tokens that it has not seen."""

    key: bytes
    unfed: Sequence[int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `InvalidRequest` for what no server has given out."""
        try:
            if not text.startswith(MARK):
                raise ValueError
            data = urlsafe_b64decode(text.removeprefix(MARK))
            unfed = np.frombuffer(data[_KEY_BYTES:], "<u4").tolist()
            handle = cls(data[:_KEY_BYTES], tuple(unfed))
        except ValueError:  # not base64, or not whole numbers
            raise invalid("prefix", "is not a handle that return_prefix has given") from None
        if not unfed or str(handle) != text:
            raise invalid("prefix", "is not a handle that return_prefix has given")
        return handle

    def __str__(self) -> str:
        """What a client has: a word for the body of a request, and for a line of a file."""
        data = self.key + np.array(self.unfed, "<u4").tobytes()
        return MARK + urlsafe_b64encode(data).decode()

    def start(self, prefix: Prefix) -> SessionValue:
        """What a session begins with that has read the whole prompt, ``prefix`` being its state."""
        *unfed, pending = self.unfed
        return SessionValue(
            id="",
            owner="",
            position=prefix.position,
            unfed=(UnfedSegment(tuple(unfed), len(unfed)),) if unfed else (),
            pending=pending,
            recent=prefix.recent,
            state=prefix.block,
            origin=Origin(self.key.hex(), prefix.position + len(self.unfed)),
        )


def keys(
    owner: str, tokens: Sequence[int], lengths: Iterable[int], origin: str = ""
) -> Iterator[bytes]:
    """The key of each prefix of ``tokens``, for ascending ``lengths``, in one pass of hashing.

    ``origin`` is the digest of what the tokens come after: the same text after another state has
    another key. blake2b, 32 bytes, over the owner's own digest and that of a given origin, which
    have a fixed length, and the tokens as little-endian int32. No length is above that of
    ``tokens``.
    """
    digest = blake2b(blake2b(owner.encode()).digest(), digest_size=_KEY_BYTES)
    if origin:  # no tokens take its place: it is hashed under a name of its own
        digest = blake2b(digest.digest(), digest_size=_KEY_BYTES, person=b"named state")
        digest.update(blake2b(origin.encode()).digest())
    data = TokenArray.of(tokens).numbers.astype("<u4", copy=False).data
    start = 0
    for length in lengths:
        assert start <= length <= len(data), (start, length, len(data))
        digest.update(data[start:length])
        start = length
        yield digest.digest()


# -------------------------------------------------------------------------------------------------
# States of prompts' beginnings, so that a text which many requests begin with is read once.
#
# An entry is the state after some number of an owner's tokens. What one is worth is the
# tokens that it saves, times its uses, for its bytes. The one
# that is worth least makes room, by GreedyDual-Size-Frequency (Cherkasova 1998,
# "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
# Policy"): the priority of file f is Pr(f) = Clock + Fr(f) Cost(f) / Size(f), here
# with an entry's uses as Fr, its tokens as Cost, and its bytes as Size. Clock rises to the
# priority of what was evicted last, so that old merit fades.
#
# Each owner's entries lie apart.


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
    is_offered: bool = False  # the second tier has it, or was offered it

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

    An entry is offered to a second tier at its use number ``min_uses``, its computation
    being the first. Up to ``max_evicted`` of those wait for `take_evicted`, the latest ones, and
    as many that were offered before and have made room. Without it there is no second tier.
    """

    def __init__(
        self,
        max_entries: int,
        max_evicted: int = 0,
        max_bytes: float = math.inf,
        min_uses: int = 1,
    ) -> None:
        assert max_entries > 0, max_entries
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._min_uses = min_uses
        self.num_entries = self._num_bytes = 0
        self.num_hits = self.num_misses = 0
        self.saved_tokens_total = 0
        self._owners: dict[str, _Owned] = {}
        self._evicted: deque[Evicted] = deque(maxlen=max_evicted)
        self._offered: deque[Evicted] = deque(maxlen=max_evicted)
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

    def insert(
        self,
        owner: str,
        prefix: Prefix,
        continued: bytes | None = None,
        *,
        is_stored: bool = False,
    ) -> bool:
        """Keeps ``prefix``, unless it is here; returns whether it is here now.

        It takes the place of the entry whose key is ``continued``, that it was computed from,
        where no other prompt has used that one: the earlier turn of a conversation. One that
        ``is_stored`` comes from the second tier.
        """
        assert prefix.num_tokens > 0
        block = prefix.block
        entries = self._owners[owner].entries if owner in self._owners else {}
        if (known := entries.get(prefix.key)) is not None:
            known.is_offered |= is_stored
            return True
        if block.num_bytes > self._max_bytes:
            return False
        if not self._has_room(block):
            superseded = None if continued is None else entries.get(continued)
            if superseded is not None and superseded.num_uses <= 2:
                self._supersede(superseded)
        while not self._has_room(block):
            self._evict()
        entry = _Entry(owner, prefix, 0.0, self._next_age(), is_offered=is_stored)
        entry.priority = self._clock + entry.worth()
        self._owners.setdefault(owner, _Owned()).add(entry)
        heapq.heappush(self._queue, (entry.priority, entry.age, entry))
        self.num_entries += 1
        self._num_bytes += block.num_bytes
        self._offer_used(entry)
        return True

    def offer(self, owner: str, key: bytes) -> None:
        """Offers an entry to the second tier at once: a client knows it by its handle."""
        self._offer(self._owners[owner].entries[key])

    def take_evicted(self) -> list[Evicted]:
        """What was offered since the last call and what was evicted, each oldest first.

        As far as it was to wait. One may be offered and evicted, in this order.
        """
        taken = [*self._offered, *self._evicted]
        self._offered.clear()
        self._evicted.clear()
        return taken

    def most_useful(self) -> list[Evicted]:
        """The entries that a restart should find again, those of the highest priority first."""
        found = [
            entry
            for owned in self._owners.values()
            for entry in owned.entries.values()
            if entry.is_offered or entry.prefix.num_tokens >= FIRST_POWER
        ]
        found.sort(key=lambda entry: (entry.priority, entry.age), reverse=True)
        return [Evicted(entry.owner, entry.prefix, kept=True) for entry in found]

    def _offer_used(self, entry: _Entry) -> None:
        if entry.num_uses >= self._min_uses:
            self._offer(entry)

    def _offer(self, entry: _Entry) -> None:
        if not entry.is_offered:
            entry.is_offered = True
            self._offered.append(Evicted(entry.owner, entry.prefix, kept=True))

    def _used(self, entry: _Entry | None) -> Prefix | None:
        if entry is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self.saved_tokens_total += entry.prefix.num_tokens
        entry.num_uses += 1
        entry.priority = self._clock + entry.worth()
        entry.age = self._next_age()
        self._offer_used(entry)
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
        if entry.is_offered:
            self._evicted.append(Evicted(entry.owner, entry.prefix))

    def _next_age(self) -> int:
        self._age += 1
        return self._age


# -------------------------------------------------------------------------------------------------
# Prompts that are fed once for several requests: from the prefix cache, and to branches.


class Prompts:
    """Takes what is known of a prompt from ``prefixes``, and leaves there what is worth it."""

    def __init__(
        self, sessions: SessionTable, prefixes: PrefixCache | None, grid: tuple[int, ...]
    ) -> None:
        self._sessions, self._prefixes, self._grid = sessions, prefixes, grid

    def start_of(self, owner: str, handle: str) -> SessionValue:
        """What a session begins with that continues the prompt that ``handle`` names.

        Raises `InvalidRequest` and `PrefixNotFound`.
        """
        named = PrefixHandle.parse(handle)
        prefix = None if self._prefixes is None else self._prefixes.find(owner, named.key)
        if prefix is None:
            raise PrefixNotFound
        return named.start(prefix)

    def expect(self, live: Live, prompt: Sequence[int]) -> None:
        """Notes where the prompt of a new session will be worth keeping, or be copied.

        What a named state or a prefix leaves unread, its last token, is the first of that prompt.
        """
        session = live.session
        if live.alone:
            live.prompt = prompt
            return
        if not session.is_new:
            return
        live.prompt_at = start = session.position
        prompt = TokenArray.joined(session.next(session.length - start), prompt)
        if self._prefixes is not None:
            before = len(prompt) - len(live.request.tokens)
            asked = [before + count for count in live.request.cache_at]
            found = boundaries(len(prompt), self._grid, start, asked)
            live.cached_at = tuple(start + count for count in found)
        copied_at = (start + len(prompt) - 1,) if live.request.num_choices > 1 else ()
        places = {*live.cached_at, *copied_at}
        live.boundaries = deque(sorted(place for place in places if place > start))
        live.prompt = prompt if live.cached_at else ()

    def skip_cached(self, live: Live) -> None:
        """Takes the state of the longest prefix that is known, instead of feeding it."""
        if self._prefixes is None or not live.cached_at:
            return
        session = live.session
        hit = self._prefixes.lookup(live.owner, live.prompt, session.origin_digest)
        if hit is None:
            return
        self._sessions.put(session, hit.block)
        session.advance(live.prompt[: hit.num_tokens])
        live.num_cached = hit.num_tokens
        self._name(live, hit)
        while live.boundaries and live.boundaries[0] <= session.position:
            live.boundaries.popleft()
        self._drop_read_prompt(live)

    def reach_boundary(self, live: Live) -> None:
        """The prompt has been fed up to one of its boundaries, or beyond."""
        session = live.session
        place = live.boundaries.popleft()
        if place == session.position and place in live.cached_at:
            state = self._sessions.state_of(session)
            assert state is not None and self._prefixes is not None
            if self._sessions.is_finite(state):
                self._keep(live, place, state)
        self._drop_read_prompt(live)

    def _keep(self, live: Live, place: int, state: StateBlock) -> None:
        """The cache takes ``state``, which has seen the text up to ``place``."""
        session = live.session
        num_read = place - live.prompt_at
        continued = live.num_cached if place == live.cached_at[-1] else 0
        lengths = (*((continued,) if continued else ()), num_read)
        *earlier, key = keys(live.owner, live.prompt, lengths, session.origin_digest)
        prefix = Prefix(key, num_read, state, place, tuple(session.recent))
        assert self._prefixes is not None
        if self._prefixes.insert(live.owner, prefix, earlier[0] if earlier else None):
            self._name(live, prefix)

    def _name(self, live: Live, prefix: Prefix) -> None:
        """Notes the handle of a prompt that ``prefix`` is the last state of."""
        if live.request.return_prefix and prefix.position >= live.cached_at[-1]:
            assert self._prefixes is not None
            self._prefixes.offer(live.owner, prefix.key)
            live.prefix = str(PrefixHandle(prefix.key, live.prompt[prefix.num_tokens :]))

    def _drop_read_prompt(self, live: Live) -> None:
        if not live.boundaries:
            live.prompt = ()


def branches(request: Request) -> list[Request]:
    """What is to be done once the prompt has been fed, by the session and by copies of it."""
    if request.continuations:
        return [
            replace(
                request,
                request_id=id,
                tokens=tokens,
                continuations=(),
                score=True,
            )
            for id, tokens in zip(request.ids, request.continuations, strict=True)
        ]
    params = request.sampling
    assert params is not None, request
    return [
        replace(
            request,
            request_id=id,
            tokens=(),
            num_choices=1,
            score=False,
            sampling=replace(params, seed=(params.seed + index) & MAX_SEED),
        )
        for index, id in enumerate(request.ids)
    ]
