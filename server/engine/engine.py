"""The engine: requests in, events out, one step at a time.

Sans-IO: no thread, socket, file or clock of its own; ``now`` is an argument. One
thread owns it. `step` does one round for all requests. What must outlive the
process comes out as records (`take_records`), in the order in which it happened;
the events of a step must not be sent before its records are safe.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

from server.engine.checks import check_request
from server.engine.config import EngineConfig
from server.engine.host import Host
from server.engine.lifecycle import Phase
from server.engine.live import Live
from server.engine.session_lifecycle import SessionEvent
from server.engine.types import EngineStats, Event, Failed, Request, SessionInfo, Started
from server.engine.value import Accepted, Past, Progress, SessionValue
from server.errors import InvalidRequest, QueueFull, SessionAttached

__all__ = ["Engine", "EngineConfig"]


class Engine(Host):
    """Continuous batching over sessions of constant size."""

    # Requests

    def submit(self, request: Request, now: float, start: SessionValue | None = None) -> None:
        """Accepts a request; its events come out of `step`.

        A new session begins as ``start`` says, and else empty. Raises `InvalidRequest`,
        `SessionNotFound`, `SessionBusy`, `CapacityExhausted` or `QueueFull`, and then nothing
        has changed.
        """
        self.expire(now)
        if request.request_id in self._live:
            raise InvalidRequest("request_id: is that of a running request", "request_id")
        check_request(request, self._model_config.vocab_size, self._config)
        if not self._scheduler.has_room:
            limit = self._config.max_waiting
            raise QueueFull(f"{limit} requests are waiting; try again later")
        if request.session is None:
            session = self._keeper.open(request.owner, request.keep, now, start)
        else:
            session = self._sessions.find(request.session, request.owner)
        draw = None if request.sampling is None else self._runner.prepare(request.sampling)
        progress = Progress(request, session.length)
        live = Live.of(progress, session, draw, self._eos_token_ids, not self._runner.grid)
        self._sessions.begin(session, live)
        self._extend(live)
        self._round.start(live)

    def restore(self, past: Past, now: float) -> SessionInfo:
        """Takes a session back from a store; a request that had not finished is parked.

        Without effect on one that is here. Raises `CapacityExhausted`.
        """
        if past.value.id in self._sessions:
            return self._info(self._sessions.find(past.value.id, past.value.owner), now)
        session, progress = self._keeper.restore(past, now)
        if progress is not None:
            params = progress.request.sampling
            draw = None if params is None else self._runner.prepare(params)
            live = Live.of(progress, session, draw, self._eos_token_ids, not self._runner.grid)
            self._sessions.run(session, live)
            live.phase, live.detached, live.started = Phase.PARKED, True, True
            live.stop_scoring()  # those of its beginning are lost
            self._live[progress.request.request_id] = live
        return self._info(session, now)

    def cancel(self, request_id: str) -> None:
        """Ends a request in the next step; one that is over already is none of its business."""
        live = self._live.get(request_id)
        if live is not None:
            self._sessions.stir(live.session)
            self._round.endings.cancelled[live] = None

    def park(self, request_id: str) -> None:
        """Parks a request; its slot is free for another."""
        live = self._live.get(request_id)
        if live is not None and not live.parked:
            self._round.park(live)

    def unpark(self, request_id: str) -> None:
        """Lets a parked request continue, when it is its turn again."""
        live = self._live.get(request_id)
        if live is not None and live.parked:
            live.move(Phase.WAITING)
            live.session.move(SessionEvent.UNPARK)
            self._sessions.stir(live.session)
            self._scheduler.add(live)

    def detach(self, request_id: str) -> None:
        """The request has lost its reader: a kept session continues for a while, then parks."""
        live = self._live.get(request_id)
        if live is None:
            return
        if not live.session.keep:
            self.cancel(request_id)
            return
        live.detached = True
        if not live.request.unattended:
            live.max_generated = live.num_generated + self._config.max_detached_tokens
        self.unpark(request_id)

    def attach(self, session: str, owner: str, request_id: str, take_over: bool) -> SessionInfo:
        """What the session runs is called ``request_id`` from now on, and is parked.

        So that the caller can read what it has missed and then `unpark` it. An
        idle session is left as it is. Raises `SessionNotFound`, and
        `SessionAttached` where the request has a reader already; with
        ``take_over`` that one gets `Failed` instead.
        """
        found = self._sessions.find(session, owner)
        live = self._sessions.request_of(found)
        if live is not None:
            if request_id in self._live:
                raise InvalidRequest("request_id: is that of a running request", "request_id")
            if not live.detached:
                if not take_over:
                    raise SessionAttached
                self._round.events.append(Failed(live.request.request_id, SessionAttached()))
            self.park(live.request.request_id)
            self._live[request_id] = self._live.pop(live.request.request_id)
            live.request = replace(live.request, request_id=request_id)
            live.detached, live.max_generated = False, sys.maxsize
            self._sessions.stir(found)
        return self._info(found, found.last_used)

    def go_on(self, session: str, owner: str) -> None:
        """Continues what a restored session runs, without a reader. Raises `SessionNotFound`."""
        live = self._sessions.request_of(self._sessions.find(session, owner))
        if live is not None and live.detached:
            self.detach(live.request.request_id)

    def take_usage(self) -> dict[str, int]:
        """Tokens computed for each owner since the last call."""
        usage, self._round.usage = self._round.usage, Counter()
        return usage

    def num_running(self, owner: str) -> int:
        """Requests of an owner that compute or wait to; those that are parked for a reader count.

        What is parked for lack of a reader does not: it takes `num_starting` to continue.
        """
        return sum(
            live.request.num_branches
            for live in self._live.values()
            if live.owner == owner and not (live.parked and live.detached)
        )

    def num_starting(self, session: str, owner: str) -> int:
        """By how many `num_running` grows when what the session runs continues."""
        live = self._sessions.request_of(self._sessions.find(session, owner))
        return int(live is not None and live.parked and live.detached)

    def cancel_session(self, session: str, owner: str) -> None:
        """Ends what the session runs, if anything. Raises `SessionNotFound`."""
        live = self._sessions.request_of(self._sessions.find(session, owner))
        if live is not None:
            self.cancel(live.request.request_id)

    def delete_session(self, session: str, owner: str) -> None:
        """Forgets the session, at once or when the running request has ended, cancelled.

        Raises `SessionNotFound`.
        """
        found = self._sessions.find(session, owner)
        live = self._sessions.request_of(found)
        if live is None:
            self._keeper.delete(found)
        else:
            self._keeper.forget(found)
            self.cancel(live.request.request_id)

    # Progress

    def step(self, now: float) -> list[Event]:
        """One round: cancels, admissions, then one token or one chunk for each running request."""
        self.expire(now)
        for live in list(self._round.endings.cancelled):
            self._round.endings.finish(live, "cancelled", now)
        self._admit(now)
        if plan := self._scheduler.plan():
            self._round.run(self._grammar_turns.choose(plan, self._scheduler.running), now)
        events = self._round.events.copy()
        self._round.events.clear()
        return events

    def has_work(self) -> bool:
        return bool(
            self._scheduler.running
            or self._round.endings.cancelled
            or self._round.events
            or self._scheduler.next_waiting()
        )

    def stats(self) -> EngineStats:
        prefixes = self._prefixes
        return EngineStats(
            max_sessions=self._pool.num_slots,
            held_slots=self._pool.num_held,
            num_sessions=len(self._sessions),
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            state_bytes_per_session=self._pool.layout.num_bytes,
            prompt_tokens_total=self._round.endings.num_prompt,
            completion_tokens_total=self._round.num_completion,
            expired_sessions_total=self._keeper.num_expired,
            num_asleep=self._sessions.num_asleep,
            num_parked=sum(live.parked for live in self._live.values()),
            evicted_sessions_total=self._keeper.num_evicted,
            preemptions_total=self._num_preempted,
            prefix_entries=prefixes.num_entries if prefixes else 0,
            prefix_hits_total=prefixes.num_hits if prefixes else 0,
            prefix_misses_total=prefixes.num_misses if prefixes else 0,
            prefix_saved_tokens_total=prefixes.saved_tokens_total if prefixes else 0,
        )

    # The parts of a step and of a submit

    def _admit(self, now: float) -> None:
        """Starts those that wait, as far as slots reach; long runners make room for them."""
        while (live := self._scheduler.next_waiting()) is not None:
            if not self._can_run(live):
                preemptible = self._scheduler.find_preemptible()
                if preemptible is None:
                    return
                self._preempt(preemptible)
                continue
            self._scheduler.start(live)
            live.move(Phase.RUNNING)
            live.num_in_turn = 0
            if not live.started:
                self._begin(live)
            if not live.session.num_unfed:
                self._round.prompt_is_fed(live, now)

    def _can_run(self, live: Live) -> bool:
        room = len(self._scheduler.running) < self._scheduler.max_running
        return room and self._sessions.wake(live.session)

    def _preempt(self, live: Live) -> None:
        self._num_preempted += 1
        self._scheduler.remove(live)
        live.move(Phase.WAITING)
        self._sessions.release(live.session)
        self._scheduler.add(live)

    def _begin(self, live: Live) -> None:
        live.started = True
        session = live.session
        place = (live.length, session.epoch, session.seq)
        self._round.events.append(Started(live.request.request_id, session.id, *place, live.start))
        self._prompts.skip_cached(live)

    def _extend(self, live: Live) -> None:
        """What the request adds to the text: a start token if asked, and its own tokens.

        A state that was tuned takes the place of the start token.
        """
        request, session = live.request, live.session
        start: tuple[int, ...] = ()
        wants_start = request.start and session.origin is None
        if session.length == 0 and (wants_start or not request.tokens):
            start = (self._model_config.bos_token_id,)
        live.start = start
        tokens = (*start, *request.tokens)
        self._keeper.record(session, Accepted(request, tokens, session.length, session.seq))
        self._prompts.expect(live, tokens)
        session.log_index += 1
        session.begin(request, tokens)
