"""The tables of an engine: the sessions that it has, and its live requests."""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from server.engine.request import Live, Phase
from server.engine.runner import Runner, StatePool
from server.engine.scheduler import Scheduler
from server.engine.session import Entry, Progress, Record, Session, SessionEvent, StateBlock, after
from server.engine.types import Event, Failed, Finished, FinishReason, Request, Usage
from server.errors import QueueFull, RequestError, SessionBusy, SessionNotFound

# -------------------------------------------------------------------------------------------------
# The table of the sessions that the engine has.
#
# A session that runs holds a slot of the pool. Any other may lose its slot to one
# that wants to run: its state then sleeps in the host's memory, until it runs
# again or leaves for a store. The pool and ``max_asleep`` bound the table, so that
# every session in it has room for its state.


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

    def change(self, session: Session, event: SessionEvent) -> None:
        """``event`` happens to a session, which may be kept."""
        if session.keep:
            session.stage = after(session.stage, event)

    def add(self, session: Session, event: SessionEvent = SessionEvent.OPEN) -> None:
        """A session without a slot, which is new or comes from the store."""
        assert self.has_room and session.id not in self._sessions, session.id
        self.change(session, event)
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
        if not live.parked:  # it was not when the session came from the store
            self.change(session, SessionEvent.BEGIN)
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

    def close(self, session: Session, event: SessionEvent = SessionEvent.CLOSE) -> None:
        """Forgets the session, with its slot."""
        assert session.id not in self._requests, session
        self.change(session, event)
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


# -------------------------------------------------------------------------------------------------
# The live requests of an engine: by their ids, through their phases, to their end.


logger = logging.getLogger("everstream.engine")

OWN_ERROR = "the engine could not do this"


class RequestTable:
    """Owns the requests, those that were ``cancelled``, and the ``events`` of the next step.

    ``longest`` is how many tokens a session's text may have, None where there is no bound.
    ``num_freed_bytes`` are those of the requests that have ended.
    """

    def __init__(
        self,
        scheduler: Scheduler[Live],
        sessions: SessionTable,
        runner: Runner,
        eos_token_ids: tuple[int, ...],
        longest: int | None = None,
        max_bytes: float = math.inf,
    ) -> None:
        self.events: list[Event] = []
        self.cancelled: dict[Live, None] = {}
        self.num_prompt_tokens = self.num_preempted = self.num_freed_bytes = 0
        self._live: dict[str, Live] = {}
        self._max_bytes, self._num_bytes = max_bytes, Counter[str]()  # by owner
        self._scheduler, self._sessions = scheduler, sessions
        self._runner, self._eos_token_ids, self._longest = runner, eos_token_ids, longest

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __iter__(self) -> Iterator[Live]:
        return iter(self._live.values())

    def get(self, request_id: str) -> Live | None:
        return self._live.get(request_id)

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def check_room(self, request: Request) -> None:
        """Raises `QueueFull` where ``request`` has too many bytes next to those that are here.

        The only request of its owner, or of all, is never too large.
        """
        num_bytes, owned = request.num_bytes, self._num_bytes[request.owner]
        all = self._num_bytes.total()
        if owned and owned + num_bytes > self._max_bytes // 2:
            raise QueueFull("this tenant's unfinished requests are too large; try again later")
        if all and all + num_bytes > self._max_bytes:
            raise QueueFull("all unfinished requests together are too large; try again later")

    def new(self, progress: Progress, session: Session) -> Live:
        """The request of ``progress`` on ``session``, for `add`."""
        params = progress.request.sampling
        draw = None if params is None else self._runner.prepare(params)
        return Live.of(progress, session, draw, self._eos_token_ids, not self._runner.grid)

    def add(self, live: Live) -> None:
        """The request waits for its turn; one that was restored is parked."""
        self._live[live.request.request_id] = live
        self._num_bytes[live.owner] += live.num_bytes
        if self._longest is not None:
            num_before = live.session.length - live.num_generated
            live.max_tokens = min(live.max_tokens, self._longest - num_before)
        if not live.parked:
            self._scheduler.add(live)

    def rename(self, live: Live, request_id: str) -> None:
        """The request has another id from now on."""
        self._live[request_id] = self._live.pop(live.request.request_id)
        live.request = replace(live.request, request_id=request_id)

    def cancel(self, live: Live) -> None:
        """Ends the request in the next step."""
        self._sessions.stir(live.session)
        self.cancelled[live] = None

    # Phases

    def start(self, live: Live) -> None:
        """The request, the next of those that wait, runs from now on."""
        self._scheduler.start(live)
        live.move(Phase.RUNNING)
        live.num_in_turn = 0

    def preempt(self, live: Live) -> None:
        """The request waits again; its slot is free for another."""
        self.num_preempted += 1
        self._scheduler.remove(live)
        live.move(Phase.WAITING)
        self._sessions.release(live.session)
        self._scheduler.add(live)

    def park(self, live: Live) -> None:
        """Pauses the request; its slot is free for another. No effect on a parked one."""
        if live.parked:
            return
        self._scheduler.remove(live)
        live.move(Phase.PARKED)
        live.drafts, live.num_drafts = (), 0
        self._sessions.change(live.session, SessionEvent.PARK)
        self._sessions.release(live.session)

    def unpark(self, live: Live) -> None:
        """Lets a parked request continue when it is its turn. No effect on another one."""
        if live.parked:
            live.move(Phase.WAITING)
            self._sessions.change(live.session, SessionEvent.UNPARK)
            self._sessions.stir(live.session)
            self._scheduler.add(live)

    # Ends

    def fail(self, live: Live, error: RequestError) -> None:
        """Takes the request out; what it has done is as if it had not been."""
        self._drop(live)
        self.events.extend(Failed(id, error) for id in live.request.ids)

    def break_off(self, live: Live, now: float) -> None:
        """Ends a request for which the engine has raised an error; called by its handler."""
        logger.exception("a request failed", extra={"request_id": live.request.request_id})  # noqa: LOG004 - see the docstring
        if live.phase is not Phase.FINISHED:
            self.finish(live, "error", now, OWN_ERROR)

    def leave(self, session: Session) -> None:
        """The session leaves the engine, with the request that it has parked."""
        if (live := self._sessions.request_of(session)) is not None:
            assert live.parked, live
            self._forget(live)

    def finish(
        self,
        live: Live,
        reason: FinishReason | None,
        now: float,
        error: str | None = None,
        drop_held: bool = False,
        grammar_ended: bool = False,
    ) -> None:
        """Takes the request out, wherever it is, and lets its session go idle or close.

        A state that an error has touched cannot be trusted: the session leaves
        without being saved, and a store continues from what it has.
        """
        request, session = live.request, live.session
        self._drop(live)
        text, thought = _held(live, drop_held)
        if request.sampling is not None:
            session.seq += 1
        within_prompt = session.num_unfed or not live.started
        if within_prompt and not live.num_generated:  # a restored one has text of its own unfed
            begun = session.position >= max(live.length, 1)
            session.cut(session.position + 1 if begun else live.length)
        if grammar_ended:
            session.constraint = None
        num_prompt = session.length - live.length - live.num_generated
        num_thought = 0 if live.turn is None else live.turn.num_thought
        drafted = live.num_accepted, live.num_rejected
        self.num_prompt_tokens += num_prompt
        finished = Finished(
            request.request_id,
            session.id if session.keep else None,
            session.seq,
            session.length,
            text,
            reason,
            Usage(num_prompt, live.num_generated, live.num_cached, num_thought, *drafted),
            error,
            grammar_ended=grammar_ended,
            thought=thought,
            prefix=live.prefix,
            **_read(live, reason),
        )
        self.events.append(finished)
        for choice in request.ids[1:]:  # it ends before they began
            self.events.append(replace(finished, request_id=choice, usage=Usage(0, 0)))
        session.log_index += 1
        self._sessions.record(session, finished)
        if reason == "error":
            self._sessions.close(session)
        else:
            self._sessions.end(session, now)

    def _drop(self, live: Live) -> None:
        """The request is live no more; its session is left to the caller."""
        if not live.parked:
            self._scheduler.remove(live)
        live.move(Phase.FINISHED)
        self._sessions.drop_request(live.session)
        self._sessions.change(live.session, SessionEvent.FINISH)
        self._forget(live)

    def _forget(self, live: Live) -> None:
        del self._live[live.request.request_id]
        self.cancelled.pop(live, None)
        self.num_freed_bytes += live.num_bytes
        self._num_bytes[live.owner] -= live.num_bytes
        if not self._num_bytes[live.owner]:
            del self._num_bytes[live.owner]


def _held(live: Live, met_stop: bool) -> tuple[str, str]:
    """What was held back of the text, and of the thinking."""
    rest = "" if live.session.keep or met_stop else live.session.detokenizer.flush()
    if live.turn is not None:
        shown = live.turn.finish(met_stop, rest)
        return shown.text, shown.thought or ""
    text = live.stop_strings.flush() if live.stop_strings and not met_stop else ""
    return text + rest, ""


def _read(live: Live, reason: FinishReason | None) -> dict[str, Any]:
    """Fields of `Finished`: what is known of the tokens fed, as far as the request wanted that."""
    request = live.request
    fields: dict[str, Any] = {"logprob_sum": live.logprob_sum}
    if live.scores is not None and request.sampling is None:
        fields["logprobs"] = tuple(score.logprob for score in live.scores)
        if request.num_top:
            fields["tops"] = tuple(tuple(score.top) for score in live.scores)
    if live.embedding is not None and reason is None:
        num_tokens = live.session.length - live.length
        fields["embedding"] = tuple((live.embedding / num_tokens).tolist())
    return fields
