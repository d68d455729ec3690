"""What owners ask of the sessions in an engine, beyond running requests on them.

Sessions are named by id and owner: another owner's session is not found.
"""

from __future__ import annotations

from model.state import StateLayout
from server.engine.keeper import Keeper, info_of
from server.engine.lifecycle import Phase
from server.engine.requests import RequestTable
from server.engine.session import Session
from server.engine.sessions import SessionTable
from server.engine.token_ids import check_tokens
from server.engine.types import Failed, Migrated, SessionInfo
from server.engine.value import Past, SessionValue
from server.errors import RequestError, SessionAttached


class OwnedSessions:
    """Creates, copies, rewinds, restores and evicts sessions. Belongs to the engine."""

    def __init__(
        self,
        table: SessionTable,
        requests: RequestTable,
        keeper: Keeper,
        vocab_size: int,
        layout: StateLayout,
    ) -> None:
        self._table, self._requests, self._keeper = table, requests, keeper
        self._vocab_size, self._layout = vocab_size, layout

    def create(self, owner: str, now: float) -> SessionInfo:
        """A kept, empty session. Raises `CapacityExhausted`."""
        self._keeper.expire(now)
        return self.of(self._keeper.open(owner, True, now), now)

    def has(self, session: str, owner: str) -> bool:
        """Whether the engine has the session, and it is ``owner``'s."""
        return self._table.has(session, owner)

    def info(self, session: str, owner: str, now: float) -> SessionInfo:
        """Raises `SessionNotFound`."""
        return self.of(self._table.find(session, owner), now)

    def value(self, session: str, owner: str) -> SessionValue:
        """The session now, with its own copy of the state. Raises `SessionNotFound`."""
        return self._keeper.value(self._table.find(session, owner))

    def fork(
        self, session: str, owner: str, num: int, now: float, past: Past | None = None
    ) -> list[SessionInfo]:
        """Copies of a session, as it is or as it was in the ``past``; they share one state.

        Raises `SessionNotFound`, `CapacityExhausted`, `InvalidRequest`.
        """
        found = self._table.find(session, owner)
        if past is None:
            value = self._keeper.value(found)
            copies = self._keeper.fork(Past(value), owner, num, now)
            self._keeper.note_fork(found, value)
        else:
            copies = self._keeper.fork(past, owner, num, now)
        return [self.of(copy, now) for copy in copies]

    def adopt(self, value: SessionValue, owner: str, now: float) -> SessionInfo:
        """A new session that continues from ``value``.

        Raises `CapacityExhausted`, and `InvalidRequest` where it holds tokens that
        the model does not have.
        """
        tokens = [*value.known, *(() if value.constraint is None else value.constraint.tokens)]
        check_tokens(tokens, self._vocab_size, "session")
        (session,) = self._keeper.fork(Past(value), owner, 1, now)
        return self.of(session, now)

    def rewind(self, session: str, owner: str, past: Past, now: float) -> SessionInfo:
        """Puts the session back to its ``past``, in a new epoch.

        Raises `SessionNotFound`, `InvalidRequest`, and `SessionBusy` while it runs
        a request.
        """
        found = self._table.find(session, owner)
        return self.of(self._keeper.rewind(found, past, now), now)

    def restore(self, past: Past, now: float) -> SessionInfo:
        """Takes a session back from a store; a request that had not finished is parked.

        Without effect on one that is here. Raises `CapacityExhausted`.
        """
        if past.value.id in self._table:
            return self.of(self._table.find(past.value.id, past.value.owner), now)
        session, progress = self._keeper.restore(past, now)
        if progress is not None:
            live = self._requests.new(progress, session)
            live.phase, live.detached, live.started = Phase.PARKED, True, True
            live.stop_scoring()  # those of its beginning are lost
            self._table.begin(session, live)
            self._requests.add(live)
        return self.of(session, now)

    def delete(self, session: str, owner: str) -> None:
        """Forgets the session, at once or when the running request has ended, cancelled.

        Raises `SessionNotFound`.
        """
        found = self._table.find(session, owner)
        live = self._table.request_of(found)
        if live is None:
            self._keeper.delete(found)
        else:
            self._keeper.forget(found)
            self._requests.cancel(live)

    def retire(self, max_sessions: int) -> int:
        """Saves and evicts kept sessions, those that run first; returns how many are left.

        The readers of what they run get `Migrated`.
        """
        kept = sorted(
            (s for s in self._table if s.keep),
            key=lambda s: self._table.request_of(s) is None,
        )
        for session in kept[:max_sessions]:
            self._evict(session, None)
        return max(0, len(kept) - max_sessions)

    def give(self, session: str, owner: str, how: str, now: float) -> SessionInfo | None:
        """Saves and evicts a session: see `server.sessions.ownership.Handover`.

        Where it has a reader and ``how`` is "ask" it stays, and is returned; with "take_over"
        its reader is told so. Raises `SessionNotFound`.
        """
        found = self._table.find(session, owner)
        live = self._table.request_of(found)
        if live is not None and not live.detached and how == "ask":
            return self.of(found, now)
        self._evict(found, SessionAttached() if how == "take_over" else None)
        return None

    def _evict(self, session: Session, why: RequestError | None) -> None:
        """Saves the session; its reader is redirected, or gets ``why`` it cannot be."""
        if (live := self._table.request_of(session)) is not None:
            request_id = live.request.request_id
            self._requests.park(live)
            place = (session.epoch, session.seq, session.length)
            event = Failed(request_id, why) if why else Migrated(request_id, session.id, *place)
            self._requests.events.append(event)
        self._keeper.evict(session)

    def discard(self, error: RequestError, id: str | None = None) -> None:
        """Forgets kept sessions, as if the process had died: the store has not followed.

        All of them, or the one called ``id``. What the store has of them is what they are.
        Readers see ``error``.
        """
        kept = [] if id is None else [r for r in self._table.records if r[0] != id]
        self._table.records = kept
        for session in self._table:
            if session.keep and id in (None, session.id):
                if (live := self._table.request_of(session)) is not None:
                    self._requests.fail(live, error)
                self._table.close(session)

    def of(self, session: Session, now: float) -> SessionInfo:
        """The session as its owner may see it."""
        live = self._table.request_of(session)
        return info_of(session, live, self._layout, now)
