"""The table of sessions: who owns which slot, how far each is, and when it expires.

An idle session (kept, running nothing) expires ``ttl_s`` seconds after it last
finished a request. A session that runs a request never expires.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from server.engine.detokenizer import Detokenizer
from server.engine.errors import CapacityExhausted, SessionBusy, SessionNotFound
from server.engine.sampling import PENALTY_WINDOW
from server.engine.state_pool import StatePool


@dataclass(eq=False, slots=True)
class Session:
    """One session, of constant size.

    ``position`` counts the tokens that the state has seen. ``pending`` is the
    text's last token, which it has not seen yet; the next request feeds it first.
    """

    id: str
    owner: str
    slot: int
    detokenizer: Detokenizer
    last_used: float
    keep: bool
    position: int = 0
    seq: int = 0
    pending: int | None = None
    running: str | None = None
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=PENALTY_WINDOW))

    @property
    def length(self) -> int:
        """Tokens of the session's text, the pending one included."""
        return self.position + (self.pending is not None)

    def hold(self, token: int) -> None:
        """Adds ``token`` to the text, to be fed by what comes next."""
        assert self.pending is None, self.pending
        self.pending = token
        self.recent.append(token)


class SessionTable:
    """Opens, finds and closes sessions; each open one holds one slot of the pool."""

    def __init__(self, pool: StatePool, ttl_s: float) -> None:
        self._pool = pool
        self._ttl_s = ttl_s
        self._sessions: dict[str, Session] = {}
        self._idle: OrderedDict[str, Session] = OrderedDict()  # longest idle first
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def open(
        self, id: str, owner: str, keep: bool, detokenizer: Detokenizer, now: float
    ) -> Session:
        """A new, empty session. Raises `CapacityExhausted` where every slot is held."""
        slot = self._pool.allocate()
        if slot is None:
            raise CapacityExhausted(
                f"all {self._pool.num_slots} sessions of this server are in use; try again later"
            )
        session = Session(id, owner, slot, detokenizer, last_used=now, keep=keep)
        self._sessions[id] = session
        if keep:
            self._idle[id] = session
        return session

    def find(self, id: str, owner: str) -> Session:
        """Raises `SessionNotFound`, also for another owner's session."""
        session = self._sessions.get(id)
        if session is None or session.owner != owner:
            raise SessionNotFound
        return session

    def begin(self, session: Session, request_id: str) -> None:
        """Marks the session as running a request. Raises `SessionBusy` where it is already."""
        if session.running is not None:
            raise SessionBusy
        session.running = request_id
        self._idle.pop(session.id, None)

    def end(self, session: Session, now: float) -> None:
        """The request is over: a kept session goes idle, another is closed."""
        session.running, session.last_used = None, now
        if session.keep:
            self._idle[session.id] = session
        else:
            self.close(session)

    def close(self, session: Session) -> None:
        """Frees the slot."""
        assert session.running is None, session.running
        del self._sessions[session.id]
        self._idle.pop(session.id, None)
        self._pool.free(session.slot)

    def next_expiry(self) -> float | None:
        """When the first idle session expires."""
        for session in self._idle.values():
            return session.last_used + self._ttl_s
        return None

    def expire(self, now: float) -> None:
        """Closes the sessions whose time is over."""
        while (due := self.next_expiry()) is not None and due <= now:
            self.close(next(iter(self._idle.values())))
            self.num_expired += 1
