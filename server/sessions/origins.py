"""What new sessions begin with beyond the engine's memory: named states, and prompts' prefixes."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

from server.engine.prefixes import FIRST_POWER, Evicted, Prefix, PrefixHandle
from server.engine.session import SessionValue
from server.engine.text import TokenArray
from server.engine.types import Request
from server.errors import RequestError
from server.runtime.async_engine import AsyncEngine
from server.store.base import Identity, ImportRefused, StoreError
from server.store.states import NamedState, export_state, import_state

# -------------------------------------------------------------------------------------------------
# The named states of one model: what the operator gave at start, and what the store keeps.
#
# All of it belongs to the event loop. A state that is in use is in memory; sessions that
# have begun with it share that memory until they run, and depend on nothing here afterwards.

#: Of states that the store keeps, those used last stay in memory, up to so many bytes.
MAX_CACHED_BYTES = 256 << 20

#: A state out of the bytes of a file. Raises `ImportRefused` and `SnapshotMismatch`.
Read = Callable[[bytes], NamedState]


class StateNotFound(RequestError):
    """No state of this name."""

    code = "state_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"state: there is no state {name}", "state")


class TooManyStates(RequestError):
    """As many states as the operator allows."""

    code = "too_many_states"

    def __init__(self, max_states: int) -> None:
        super().__init__(f"name: the model has its {max_states} states; delete one first", "name")


class StateFixed(RequestError):
    """A state that --state or the model's own file gave: it is changed where it was given."""

    code = "state_fixed"

    def __init__(self, name: str) -> None:
        super().__init__(f"name: the state {name} was given at start", "name")


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What is known of a state without loading it. ``fixed``: it was given at start."""

    name: str
    digest: str
    fixed: bool


class NamedStates:
    """``fixed`` are the states given at start; the store has at most ``max_states`` more."""

    def __init__(
        self,
        async_engine: AsyncEngine,
        identity: Identity,
        fixed: Mapping[str, NamedState],
        max_states: int,
        read: Read | None = None,
    ) -> None:
        self._async_engine, self._identity, self._fixed = async_engine, identity, dict(fixed)
        self._max_states = max_states
        self._read: Read = read or (lambda data: import_state(data, identity))
        self._cached: OrderedDict[str, NamedState] = OrderedDict()

    async def start_of(self, name: str) -> SessionValue:
        """What a session begins with. Raises `StateNotFound`, or an error of the store."""
        return (await self.find(name)).value

    async def find(self, name: str) -> NamedState:
        """The state called ``name``; see `start_of`.

        Raises `SnapshotMismatch` where the store has it from another backend or dtype.
        """
        if name in self._fixed:
            return self._fixed[name]
        digests = await self._async_engine.ask_store(lambda store: store.named_states())
        if name not in digests:
            raise StateNotFound(name)
        if (state := self._cached.get(digests[name])) is None:
            data = await self._async_engine.ask_store(lambda store: store.read_named(name))
            if data is None:  # deleted meanwhile
                raise StateNotFound(name)
            state = await asyncio.to_thread(_stored, data, self._identity, name)
        self._keep(state)
        return state

    async def listed(self) -> list[StateInfo]:
        """All of them by name."""
        stored = await self._async_engine.ask_store(lambda store: store.named_states())
        found = {name: StateInfo(name, digest, False) for name, digest in stored.items()}
        found |= {name: StateInfo(name, s.digest, True) for name, s in self._fixed.items()}
        return [info for _, info in sorted(found.items())]

    async def put(self, name: str, data: bytes) -> NamedState:
        """Keeps the state in a file under ``name``, in the place of one that has it.

        Raises `ImportRefused`, `SnapshotMismatch`, `TooManyStates`, `StateFixed`, `StoreError`.
        """
        self._check_free(name)
        state = await asyncio.to_thread(self._read, data)
        digests = await self._async_engine.ask_store(lambda store: store.named_states())
        if name not in digests and len(digests) >= self._max_states:
            raise TooManyStates(self._max_states)
        parts = export_state(state, self._identity)
        await self._async_engine.ask_store(lambda store: store.put_named(name, state.digest, parts))
        self._keep(state)
        return state

    async def delete(self, name: str) -> None:
        """Sessions that have begun with it continue. Raises `StateNotFound` and `StateFixed`."""
        self._check_free(name)
        if not await self._async_engine.ask_store(lambda store: store.drop_named(name)):
            raise StateNotFound(name)

    async def export(self, name: str) -> bytes:
        """The file of a state. Raises as `find`."""
        state = await self.find(name)
        return await asyncio.to_thread(lambda: b"".join(export_state(state, self._identity)))

    def _check_free(self, name: str) -> None:
        if name in self._fixed:
            raise StateFixed(name)

    def _keep(self, state: NamedState) -> None:
        """In memory, with those that were used last; the newest stays, however large."""
        self._cached[state.digest] = state
        self._cached.move_to_end(state.digest)
        num_bytes = sum(map(_size, self._cached.values()))
        while len(self._cached) > 1 and num_bytes > MAX_CACHED_BYTES:
            num_bytes -= _size(self._cached.popitem(last=False)[1])


def _size(state: NamedState) -> int:
    block = state.value.state
    return 0 if block is None else block.num_bytes


def _stored(data: bytes, identity: Identity, name: str) -> NamedState:
    try:
        return import_state(data, identity)
    except ImportRefused as error:  # it was good when it was put there
        raise StoreError(f"the state {name} is broken: {error.message}", "state") from error


# -------------------------------------------------------------------------------------------------
# The prefix cache's second tier between the event loop and the engine.
#
# What the engine offers is written by a thread of its own, and at the end what memory has.
# A prompt whose beginning is there waits for its own state to be read, no other request
# does, and none waits beyond a short time: the tier may hang, and what it has can be computed.

logger = logging.getLogger("everstream.prefixes")

#: States that wait to be written; of more the oldest are dropped.
MAX_UNWRITTEN = 64
#: Bytes of states that are written when the server stops, so that it stops soon.
MAX_SAVED_BYTES = 256 << 20
#: Of more tokens a thread looks for the beginnings, 35 ns each.
MAX_INLINE_TOKENS = 4096
#: How long an engine may take to name them.
SAVE_TIMEOUT_S = 5.0


class Prefixes(Protocol):
    """Where states go: `PrefixFiles` of a folder, `SharedPrefixes` of several replicas."""

    def put(self, evicted: Sequence[Evicted]) -> None:
        """Keeps these. Raises `OSError`."""

    def find(self, owner: str, tokens: Sequence[int], origin: str = "") -> Prefix | None:
        """The longest beginning of ``tokens`` that is here and not in memory.

        See `server.engine.prefixes.keys` for ``origin``.
        """

    def named(self, owner: str, key: bytes) -> Prefix | None:
        """The one of this key, where it is here and not in memory."""

    def may_find(self, owner: str, tokens: Sequence[int], origin: str = "") -> bool:
        """False where it is certain, without waiting, that `find` has nothing. For any thread."""

    def may_name(self, owner: str, key: bytes) -> bool:
        """The same of `named`."""


class PrefixTier:
    """Belongs to the event loop. ``bos_token_id`` begins a text in an empty session.

    A request waits for ``timeout_s`` at most, and one that comes while another's state is
    overdue does not wait at all. ``at_end`` is the last thing that the tier's thread does, after
    up to ``max_saved_bytes`` of what memory had.
    """

    def __init__(
        self,
        async_engine: AsyncEngine,
        prefixes: Prefixes,
        bos_token_id: int,
        *,
        timeout_s: float | None = None,
        max_saved_bytes: int = MAX_SAVED_BYTES,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._async_engine, self._prefixes = async_engine, prefixes
        self._bos_token_id = bos_token_id
        self._timeout_s, self._at_end = timeout_s, at_end
        self._max_saved_bytes = max_saved_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefixes")
        self._unwritten: deque[Evicted] = deque(maxlen=MAX_UNWRITTEN)
        #: Calls of `_put`, and those whose states the thread has written.
        self._num_put = self._num_written = 0
        self._saved: list[Evicted] = []
        self._fetching: set[asyncio.Task[None]] = set()
        self._overdue: asyncio.Task[None] | None = None
        self._closing = False
        async_engine.on_evicted_prefixes = self._put

    async def fetch(self, request: Request, start: SessionValue | None = None) -> None:
        """Brings the beginning of the request's prompt back to the engine, if it is there.

        ``start`` is the named state that its session begins with. Or the beginning that the
        request names.
        """
        find = self._wanted(request, start)
        if find is None or (self._overdue is not None and not self._overdue.done()):
            return
        loop = asyncio.get_running_loop()
        finding = loop.run_in_executor(self._thread, find)
        fetching = loop.create_task(self._fetch(request.owner, finding))
        self._fetching.add(fetching)
        fetching.add_done_callback(self._fetched)
        done, _ = await asyncio.wait({fetching}, timeout=self._timeout_s)
        if not done:
            self._overdue = fetching
        elif not fetching.cancelled():
            fetching.result()

    async def save(self) -> None:
        """Notes for `close` what a restart should find; before the async engine stops."""
        if not self._async_engine.healthy:
            return
        with suppress(RequestError, TimeoutError):
            async with asyncio.timeout(SAVE_TIMEOUT_S):
                found = await self._async_engine.call(
                    lambda engine, now: engine.most_useful_prefixes(), urgent=True
                )
            sizes = accumulate(entry.prefix.block.num_bytes for entry in found)
            num = sum(size <= self._max_saved_bytes for size in sizes)
            self._saved = found[:num][::-1]  # the most useful last: it makes room last

    def close(self) -> None:
        """Writes what is outstanding, and what was noted by `save`."""
        self._closing = True
        self._thread.submit(self._write)
        self._thread.submit(self._put_to_tier, self._saved)
        self._thread.submit(self._at_end)
        self._thread.shutdown()

    def _wanted(
        self, request: Request, start: SessionValue | None
    ) -> Callable[[], Prefix | None] | None:
        """What is to be asked for the request, if anything."""
        # What waits to be written may be found behind it.
        is_settled = self._num_put == self._num_written
        if request.prefix is not None:
            key = PrefixHandle.parse(request.prefix).key
            if is_settled and not self._prefixes.may_name(request.owner, key):
                return None
            return partial(self._prefixes.named, request.owner, key)
        if request.session is not None or len(request.tokens) < FIRST_POWER or request.score:
            return None
        text = TokenArray.joined(self._before(request, start), request.tokens)
        origin = "" if start is None or start.origin is None else start.origin.digest
        wanted = request.owner, text, origin
        is_short = len(text) <= MAX_INLINE_TOKENS
        if is_settled and is_short and not self._prefixes.may_find(*wanted):
            return None
        return partial(self._prefixes.find, *wanted)

    def _before(self, request: Request, start: SessionValue | None) -> tuple[int, ...]:
        """What the session's state has not seen before the request's own tokens."""
        if start is not None:
            return () if start.pending is None else (start.pending,)
        return (self._bos_token_id,) if request.start else ()

    async def _fetch(self, owner: str, finding: asyncio.Future[Prefix | None]) -> None:
        if (prefix := await finding) is not None:
            await self._async_engine.call(lambda engine, now: engine.insert_prefix(owner, prefix))

    def _fetched(self, fetching: asyncio.Task[None]) -> None:
        """Requests that still wait for it see its error; for others it is none."""
        self._fetching.discard(fetching)
        if not fetching.cancelled() and (error := fetching.exception()) is not None:
            logger.debug("a prompt's state could not be fetched: %s", error)

    def _put(self, evicted: Sequence[Evicted]) -> None:
        self._num_put += 1
        self._unwritten.extend(evicted)
        self._thread.submit(self._write)

    def _write(self) -> None:
        """One after the other, and each prompt that waits for its state comes in between."""
        while self._unwritten:
            self._put_to_tier([self._unwritten.popleft()])
            if self._fetching and not self._closing:
                self._thread.submit(self._write)
                return
        self._num_written += 1

    def _put_to_tier(self, evicted: Sequence[Evicted]) -> None:
        try:
            if evicted:
                self._prefixes.put(evicted)
        except OSError as error:
            logger.warning("a prompt's state could not be written: %s", error)
