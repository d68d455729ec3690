"""The table of the sessions that the engine has.

A session that runs holds a slot of the pool. Any other may lose its slot to one
that wants to run: its state then sleeps in the host's memory, until it runs
again or leaves for a store. The pool and ``max_asleep`` bound the table, so that
every session in it has room for its state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from server.engine.live import Live
from server.engine.session import Session
from server.engine.state_pool import StatePool
from server.engine.value import Entry, Record, StateBlock
from server.errors import SessionBusy, SessionNotFound


class SessionTable:
    """Opens, finds and closes sessions, and moves their states between slots and sleep.

    ``records`` are what has happened to the kept ones, in order, for a store. ``asleep_bytes``
    are those of the states that have lost their slot or never had one.
    """

    def __init__(self, pool: StatePool, max_asleep: int, ttl_s: float) -> None:
        self.records: list[Record] = []
        self._pool = pool
        self._max_sessions = pool.num_slots + max_asleep
        self._ttl_s = ttl_s
        self.asleep_bytes = 0
        self._sessions: dict[str, Session] = {}
        self._requests: dict[str, Live] = {}  # by the session that runs them
        self._quiet: OrderedDict[str, Session] = OrderedDict()  # run nothing; longest idle first
        self._slotted: OrderedDict[str, Session] = OrderedDict()  # may lose their slot

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, id: str) -> bool:
        return id in self._sessions

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    @property
    def num_asleep(self) -> int:
        return sum(session.state is not None for session in self._sessions.values())

    @property
    def has_room(self) -> bool:
        """Whether one more session may be added."""
        return len(self._sessions) < self._max_sessions

    def record(self, session: Session, entry: Entry) -> None:
        """Notes what happened, if the session is kept."""
        if session.keep:
            self.records.append((session.id, entry))

    def add(self, session: Session) -> None:
        """A session without a slot, which is new or comes from the store."""
        assert self.has_room and session.id not in self._sessions, session.id
        self._sessions[session.id] = session
        self._hold(session, session.state)
        if session.keep:
            self._quiet[session.id] = session

    def has(self, id: str, owner: str) -> bool:
        """Whether `find` finds it."""
        session = self._sessions.get(id)
        return session is not None and session.owner == owner

    def find(self, id: str, owner: str) -> Session:
        """Raises `SessionNotFound`, also for another owner's session."""
        session = self._sessions.get(id)
        if session is None or session.owner != owner:
            raise SessionNotFound
        return session

    def begin(self, session: Session, live: Live) -> None:
        """The session runs ``live``. Raises `SessionBusy` where it runs another one."""
        if session.id in self._requests:
            raise SessionBusy
        self._requests[session.id] = live
        if not live.parked:
            self._quiet.pop(session.id, None)

    def request_of(self, session: Session) -> Live | None:
        """The request that the session runs."""
        return self._requests.get(session.id)

    def drop_request(self, session: Session) -> None:
        """The session runs nothing; the caller says what becomes of it."""
        self._requests.pop(session.id, None)

    def end(self, session: Session, now: float) -> None:
        """The request is over: a kept session goes idle, another is closed."""
        self.drop_request(session)
        if session.keep:
            self.rest(session, now)
            self.release(session)
        else:
            self.close(session)

    def close(self, session: Session) -> None:
        """Forgets the session, with its slot."""
        assert session.id not in self._requests, session
        del self._sessions[session.id]
        self._quiet.pop(session.id, None)
        self._slotted.pop(session.id, None)
        if session.slot is not None:
            self._pool.free(session.slot)
            session.slot = None
        self._hold(session, None, session.state)

    def rest(self, session: Session, now: float) -> None:
        """No request waits for the session: it is idle, and may be evicted."""
        session.last_used = now
        self._quiet[session.id] = session

    def stir(self, session: Session) -> None:
        """The session is wanted again."""
        self._quiet.pop(session.id, None)

    # States

    def wake(self, session: Session) -> bool:
        """Gives the session a slot with its state; False where every slot is held for good."""
        if session.slot is None:
            slot = self._pool.allocate()
            if slot is None:
                if not self._slotted:
                    return False
                self._sleep(next(iter(self._slotted.values())))
                slot = self._pool.allocate()
                assert slot is not None
            if session.state is not None:
                self._pool.write(slot, session.state)
                self._hold(session, None, session.state)
            session.slot = slot
        self._slotted.pop(session.id, None)
        return True

    def put(self, session: Session, state: StateBlock) -> None:
        """Makes ``state`` that of a session that has a slot."""
        assert session.slot is not None, session
        self._pool.write(session.slot, state)

    def release(self, session: Session) -> None:
        """The session does not run now: its slot may be reused."""
        if session.slot is not None:
            self._slotted[session.id] = session

    def state_of(self, session: Session) -> StateBlock | None:
        """The session's state, to keep: a copy where it is in a slot.

        Copies of one position are of one state, which a store writes once.
        """
        if session.position == 0 and session.origin is None:
            return None
        if session.slot is None:
            return session.state
        state = self._pool.read(session.slot, session.position)
        if session.stored is not None and session.stored[0] == session.position:
            state.stored = session.stored[1]
        session.stored = session.position, state.stored
        return state

    def is_finite(self, state: StateBlock | None) -> bool:
        """Whether ``state`` is worth keeping: what is not finite in it never will be again."""
        return state is None or self._pool.is_finite(state)

    def _sleep(self, session: Session) -> None:
        self._hold(session, self.state_of(session))
        assert session.slot is not None
        self._pool.free(session.slot)
        if session.constraint is not None:
            session.constraint.rest()
        session.slot = None
        del self._slotted[session.id]

    def _hold(
        self, session: Session, state: StateBlock | None, before: StateBlock | None = None
    ) -> None:
        """The session has ``state`` outside of the pool now, and had ``before`` there."""
        session.state = state
        self.asleep_bytes += 0 if state is None else state.num_bytes
        self.asleep_bytes -= 0 if before is None else before.num_bytes

    # Ends

    def oldest_beyond(self, max_bytes: float) -> Session | None:
        """Where states without a slot have more than ``max_bytes``, the one idle for longest.

        A free slot has room for a state. As many sessions as fit with full states stay in any case,
        and the one that was used last: its request may be on the way.
        """
        num_fitting = self._pool.num_slots + max_bytes // self._pool.state_bytes
        num_free = self._pool.num_slots - self._pool.num_held
        room = max_bytes + num_free * self._pool.state_bytes
        if self.asleep_bytes <= room or len(self._sessions) <= num_fitting:
            return None
        newest = next(reversed(self._quiet.values()), None)
        older = (one for one in self._quiet.values() if one is not newest)
        return next((one for one in older if one.state is not None), None)

    def oldest_quiet(self) -> Session | None:
        """The session that has been idle for longest."""
        return next(iter(self._quiet.values()), None)

    def oldest_expendable(self) -> Session | None:
        """The same of those that are not promised to a request."""
        return next((one for one in self._quiet.values() if one.expendable), None)

    def next_expiry(self) -> float | None:
        """When the first idle session's time is over."""
        session = self.oldest_quiet()
        return None if session is None else session.last_used + self._ttl_s
