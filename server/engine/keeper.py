"""Sessions that outlive their requests: opened, forked, rewound, saved, sent away and taken back.

What happens to them comes out as records, for a store.
"""

from __future__ import annotations

from dataclasses import replace

from model.state import StateLayout
from model.tokenizer import Tokenizer
from server.engine.checks import check_loaded
from server.engine.config import EngineConfig
from server.engine.detokenizer import Detokenizer
from server.engine.live import Live
from server.engine.replay import replay
from server.engine.requests import RequestTable
from server.engine.session import Session
from server.engine.sessions import SessionTable
from server.engine.types import SessionInfo
from server.engine.value import (
    Deleted,
    Opened,
    Past,
    Progress,
    Rewound,
    Saved,
    SessionValue,
    StateBlock,
)
from server.errors import CapacityExhausted, InvalidRequest, SessionBusy

#: A session with a state of so many bytes is saved where it is forked: what the fork has written
#: of the state is then there for the next fork, also when this one has been deleted.
SAVED_FORK_BYTES = 4 << 20
#: A save comes once in this part of the unread prompt, so that all of them together have no more
#: than this many times its tokens.
UNREAD_PER_SAVE = 8


class Keeper:
    """Makes sessions, keeps and copies them. Owned by the engine.

    A session that leaves takes the request with it that it has parked. ``longest`` is how many
    tokens a text may have, None where there is no bound.
    """

    def __init__(
        self,
        table: SessionTable,
        requests: RequestTable,
        tokenizer: Tokenizer,
        config: EngineConfig,
        longest: int | None = None,
    ) -> None:
        self.num_expired = self.num_evicted = 0
        self._table, self._requests = table, requests
        self._tokenizer, self._config, self._longest = tokenizer, config, longest

    def open(
        self, owner: str, keep: bool, now: float, start: SessionValue | None = None
    ) -> Session:
        """A new session, empty or as ``start`` says. Raises `CapacityExhausted`."""
        self.make_room()
        value = SessionValue(self._config.new_id(), owner)
        if start is not None:
            value = replace(start, id=value.id, owner=owner)
        session = Session.of(value, Detokenizer(self._tokenizer), now)
        session.keep = keep
        self._table.add(session)
        self._table.record(session, Opened(session.value(session.state)))
        return session

    def value(self, session: Session) -> SessionValue:
        """The session now, with its own copy of the state."""
        live = self._table.request_of(session)
        progress = None if live is None else live.progress
        return session.value(self._table.state_of(session), progress)

    def save(self, session: Session) -> None:
        """Records the session's value, so that what came before is not needed to continue."""
        session.saved_position = session.position
        self._record_value(session, evicted=False)

    def save_if_due(self, session: Session) -> None:
        """Saves a kept session once in ``save_interval`` tokens.

        Less often while much of a long prompt is unread: what is unread is saved as well.
        """
        interval = max(self._config.save_interval, session.num_unfed // UNREAD_PER_SAVE)
        if session.position - session.saved_position >= interval:
            self.save(session)

    def delete(self, session: Session) -> None:
        """Forgets a session that runs nothing."""
        self._table.record(session, Deleted())
        self._table.close(session)

    def forget(self, session: Session) -> None:
        """A session that runs something will end with it."""
        self._table.record(session, Deleted())
        session.keep = False

    # Copies

    def copy(self, session: Session, state: StateBlock | None, now: float) -> Session:
        """A session like ``session`` that is not kept. Raises `CapacityExhausted`."""
        self.make_room()
        value = replace(session.value(state), id=self._config.new_id(), seq=0)
        copy = Session.of(value, Detokenizer(self._tokenizer), now)
        copy.keep = False
        self._table.add(copy)
        return copy

    def fork(self, past: Past, owner: str, num: int, now: float) -> list[Session]:
        """``num`` sessions as the ``past`` was; they share one state.

        Raises `CapacityExhausted`, `ContextExceeded`, and `InvalidRequest` where that past never
        was; then there is none of them.
        """
        copies: list[Session] = []
        try:
            for _ in range(num):
                self.make_room()
                copy = self._from_past(past, self._config.new_id(), owner, now)
                copy.epoch = copy.seq = copy.log_index = 0
                self._table.add(copy)
                copies.append(copy)
                self._table.record(copy, Opened(copy.value(copy.state)))
        except CapacityExhausted:
            for copy in copies:
                self.delete(copy)
            raise
        return copies

    def rewind(self, old: Session, past: Past, now: float) -> Session:
        """The session as it was in the ``past``, in a new epoch.

        Raises `SessionBusy` while it runs a request, and `InvalidRequest`.
        """
        if self._table.request_of(old) is not None:
            raise SessionBusy
        new = self._from_past(past, old.id, old.owner, now)
        new.epoch, new.seq, new.log_index = old.epoch + 1, old.seq, old.log_index
        self._table.close(old)
        self._table.add(new)
        self._table.record(new, Rewound(new.value(new.state)))
        return new

    def _from_past(self, past: Past, id: str, owner: str, now: float) -> Session:
        value = replace(past.value, id=id, owner=owner, progress=None)
        session = Session.of(value, Detokenizer(self._tokenizer), now)
        replay(session, None, past.entries, past.at)
        check_loaded(session.length, self._longest)
        if past.at is not None and session.length != past.at:
            raise InvalidRequest(f"at: the session has only {session.length} tokens", "at")
        return session

    # To a store and back

    def restore(self, past: Past, now: float) -> tuple[Session, Progress | None]:
        """A session that a store has kept, and its request that had not finished.

        Raises `CapacityExhausted` and `ContextExceeded`.
        """
        self.make_room()
        session = Session.of(past.value, Detokenizer(self._tokenizer), now)
        progress = replay(session, past.value.progress, past.entries)
        check_loaded(session.length, self._longest)
        self._table.add(session)
        return session, progress

    def make_room(self) -> None:
        """For one more session. Raises `CapacityExhausted`."""
        if self._table.has_room:
            return
        if self._config.can_evict and (session := self._table.oldest_quiet()) is not None:
            self.evict(session)
        elif (session := self._table.oldest_expendable()) is not None:
            self.delete(session)
        else:
            raise CapacityExhausted(
                f"all {len(self._table)} sessions that fit this server are in use; try again later"
            )

    def evict(self, session: Session) -> None:
        """The store alone has the session from now on, with what it runs, which is parked."""
        self.num_evicted += 1
        self._record_value(session, evicted=True)
        self._forget(session)

    def expire(self, now: float) -> None:
        """Evicts sessions that have been idle for too long: to the store, or for good."""
        while (due := self._table.next_expiry()) is not None and due <= now:
            session = self._table.oldest_quiet()
            assert session is not None
            self.num_expired += 1
            if self._config.can_evict:
                self.evict(session)
            else:
                self._table.record(session, Deleted())
                self._forget(session)

    def trim(self) -> None:
        """Evicts idle sessions as long as states take more than `EngineConfig.max_asleep_bytes`."""
        if not self._config.can_evict:
            return
        max_bytes = self._config.max_asleep_bytes
        while (session := self._table.oldest_beyond(max_bytes)) is not None:
            self.evict(session)

    def note_fork(self, session: Session, value: SessionValue) -> None:
        """Forks have just been made of ``value``, which the session has now."""
        state = value.state
        if state is None or state.num_bytes < SAVED_FORK_BYTES or not session.keep:
            return
        if session.saved_position != session.position and self._table.is_finite(state):
            session.saved_position = session.position
            self._table.record(session, Saved(value))

    def _record_value(self, session: Session, evicted: bool) -> None:
        """Unless a store continues better from what it has."""
        value = self.value(session)
        if self._table.is_finite(value.state):
            self._table.record(session, Saved(value, evicted))

    def _forget(self, session: Session) -> None:
        """With the request that it has parked."""
        self._requests.leave(session)
        self._table.drop_request(session)
        self._table.close(session)


def info_of(session: Session, live: Live | None, layout: StateLayout, now: float) -> SessionInfo:
    """The session as its owner may see it, with the request that it runs."""
    return SessionInfo(
        session.id,
        session.length,
        session.seq,
        live is not None,
        0.0 if live is not None else now - session.last_used,
        layout.used_bytes(session.position),
        session.epoch,
        live is not None and live.parked,
    )
