"""Sessions that outlive their requests: opened, forked, rewound, saved, sent away, taken back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from model.state import StateLayout
from model.tokenizer import Tokenizer
from server.engine.limits import EngineConfig, check_loaded
from server.engine.request import Live, Phase, turn_of
from server.engine.session import (
    Accepted,
    Deleted,
    Entry,
    Opened,
    Past,
    Progress,
    Rewound,
    Saved,
    Session,
    SessionEvent,
    SessionValue,
    Stage,
    StateBlock,
)
from server.engine.tables import RequestTable, SessionTable
from server.engine.text import Detokenizer, StopStrings, TurnText, check_tokens
from server.engine.types import Failed, Finished, Migrated, SessionInfo, TokenEvent
from server.errors import (
    CapacityExhausted,
    InvalidRequest,
    RequestError,
    SessionAttached,
    SessionBusy,
)

# -------------------------------------------------------------------------------------------------
# From a session's last saved value and the log's entries after it to the present.
#
# Nothing is computed: the entries become text that the state has not been fed. The engine
# feeds it, cut as it was the first time, before anything new.


def replay(
    session: Session, progress: Progress | None, entries: Sequence[Entry], at: int | None = None
) -> Progress | None:
    """Brings ``session`` forward by ``entries``; returns the request that had not finished.

    With ``at`` only to where its text has that many tokens, with no request; its
    ``seq``, ``epoch`` and ``log_index`` are still those of all entries.
    """
    past: list[Entry] = []
    length = session.length
    for entry in entries:
        if isinstance(entry, Rewound):
            past = [*_until(past, entry.value.length), entry]
            length = min(length, entry.value.length)
            session.epoch = entry.value.epoch
        else:
            past.append(entry)
            session.log_index += isinstance(entry, Accepted | TokenEvent | Finished)
    if at is not None:
        past = _until(past, at)
        length = min(length, at)
    session.cut_prompt(length)
    progress = _apply(session, progress, past)
    if at is not None:
        session.cut(min(at, session.length))
    seqs = [e.seq for e in entries if isinstance(e, TokenEvent | Finished)]
    session.seq = max([session.seq, *seqs])
    ended = at is not None or any(isinstance(entry, Rewound) for entry in entries[-1:])
    return None if ended else progress


def _apply(
    session: Session, progress: Progress | None, entries: Iterable[Entry]
) -> Progress | None:
    stops, turn = _requests(progress)
    num_generated = 0 if progress is None else progress.num_generated
    for entry in entries:
        if isinstance(entry, TokenEvent):
            exact = session.constraint is not None
            text = session.detokenizer.push(entry.token_id, exact)
            if stops is not None:
                stops.push(text)
            session.hold(entry.token_id)
            if session.constraint is not None:
                session.constraint.tokens.append(entry.token_id)
            if turn is not None and progress is not None:
                turn.push(text)
                session.end_thinking(progress.request, turn)
            num_generated += 1
        elif isinstance(entry, Accepted):
            progress, num_generated = Progress(entry.request, entry.length), 0
            stops, turn = _requests(progress)
            session.begin(entry.request, entry.tokens)
        elif isinstance(entry, Finished):
            session.cut(entry.position)  # shorter where it was cancelled within its prompt
            progress = stops = turn = None
            if entry.grammar_ended:
                session.constraint = None
        elif isinstance(entry, Rewound):
            session.write_on(entry.value)
    if progress is None:
        return None
    withheld = stops.withheld if stops is not None else ""
    state = turn.state if turn is not None else None
    return Progress(progress.request, progress.length, num_generated, withheld, turn=state)


def _requests(progress: Progress | None) -> tuple[StopStrings | None, TurnText | None]:
    """What reads the text of a request: its stop strings, or a chat's turn."""
    if progress is None or progress.request.sampling is None:
        return None, None
    if (turn := turn_of(progress)) is not None:
        return None, turn
    stops = StopStrings(progress.request.sampling.stop)
    stops.restore(progress.withheld)
    return stops, None


def _until(entries: Sequence[Entry], length: int) -> list[Entry]:
    """The entries that make the first ``length`` tokens of the text."""
    kept: list[Entry] = []
    for entry in entries:
        if isinstance(entry, Accepted):
            if entry.length >= length:
                break
            kept.append(_cut(entry, length - entry.length))
        elif isinstance(entry, TokenEvent):
            if entry.position >= length:
                break
            kept.append(entry)
        elif isinstance(entry, Finished):
            kept.append(replace(entry, position=min(entry.position, length)))
        elif isinstance(entry, Rewound):
            kept.append(entry)
    return kept


def _cut(entry: Accepted, num_tokens: int) -> Accepted:
    """Within its prompt nothing was to be generated yet, and so under no grammar."""
    if num_tokens >= len(entry.tokens):
        return entry
    request = replace(entry.request, sampling=None)
    return entry._replace(request=request, tokens=entry.tokens[:num_tokens])


# -------------------------------------------------------------------------------------------------
# What happens to them comes out as records, for a store.


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
        session.stage = Stage.LOADING
        is_done = progress is None
        self._table.add(
            session, SessionEvent.RESTORE if is_done else SessionEvent.RESTORE_UNFINISHED
        )
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
        self._table.change(session, SessionEvent.EVICT)
        self._record_value(session, evicted=True)
        self._forget(session, SessionEvent.SAVED)

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
                self._forget(session, SessionEvent.CLOSE)

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

    def _forget(self, session: Session, event: SessionEvent) -> None:
        """With the request that it has parked."""
        if event is SessionEvent.CLOSE and self._table.request_of(session) is not None:
            self._table.change(session, SessionEvent.FINISH)
        self._requests.leave(session)
        self._table.drop_request(session)
        self._table.close(session, event)


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


# -------------------------------------------------------------------------------------------------
# What owners ask of the sessions in an engine, beyond running requests on them.
#
# Sessions are named by id and owner: another owner's session is not found.


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

    def stage(self, session: str, owner: str) -> Stage:
        """Where it is in its life. Raises `SessionNotFound`."""
        return self._table.find(session, owner).stage

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
        """Saves and evicts a session: see `server.sessions.loader.Handover`.

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
