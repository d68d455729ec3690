"""One round of the engine: one call of the runner, and what comes of each row.

An error in one request ends that request alone: a call of the
runner that fails has changed nothing, and is repeated row by row.
"""

from __future__ import annotations

import logging
from collections import Counter

from server.engine.constraint import Matchers
from server.engine.endings import RequestEndings
from server.engine.keeper import Keeper
from server.engine.lifecycle import Phase
from server.engine.live import Live
from server.engine.prompts import Prompts, branches
from server.engine.rows import note_logprobs, read, row
from server.engine.runner import NO_TOKEN, NOT_FINITE, Feed, Runner
from server.engine.scheduler import Scheduler
from server.engine.session_lifecycle import SessionEvent
from server.engine.sessions import SessionTable
from server.engine.types import Event, Failed, Scored, TokenEvent
from server.engine.value import Progress
from server.errors import CapacityExhausted, OutOfMemory

logger = logging.getLogger("everstream.engine")

NOT_FINITE_ERROR = "the model's output is not finite"
#: Rounds without a want of memory after which one more request may run.
CALM_ROUNDS = 256

OWN_ERROR = "the engine could not do this"

Row = tuple[Live, Feed]


class Round:
    """The engine's requests in motion. ``events`` come out first in the next round."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler[Live],
        sessions: SessionTable,
        keeper: Keeper,
        prompts: Prompts,
        live: dict[str, Live],
        eos_token_ids: tuple[int, ...],
        matchers: Matchers,
        vocab_size: int,
    ) -> None:
        self.events: list[Event] = []
        self.endings = RequestEndings(self.events, scheduler, sessions, keeper, live)
        self.num_completion = 0
        self.usage: Counter[str] = Counter()
        self._runner, self._scheduler = runner, scheduler
        self._max_running, self._num_calm = scheduler.max_running, 0
        self._sessions, self._keeper = sessions, keeper
        self._prompts, self._live = prompts, live
        self._eos_token_ids, self._matchers = eos_token_ids, matchers
        self._vocab_size = vocab_size

    def start(self, live: Live) -> None:
        """The request waits for its turn from now on."""
        self._live[live.request.request_id] = live
        self._scheduler.add(live)

    def park(self, live: Live) -> None:
        """Takes the request out of its turn; its slot is free for another."""
        self._scheduler.remove(live)
        live.move(Phase.PARKED)
        live.session.move(SessionEvent.PARK)
        self._sessions.release(live.session)

    # What it computes

    def run(self, plan: list[tuple[Live, int]], now: float) -> None:
        """One call of the runner for all rows; row by row where that fails."""
        rows, alone = self._rows(plan, now)
        try:
            tokens = self._runner.run([feed for _, feed in rows]) if rows else []
        except MemoryError:
            self._shrink(now)
            rows, tokens = [], []
        except Exception:
            tokens = [self._token(live, feed, now) for live, feed in rows]
        else:
            if any(live.wants_logprobs for live, _ in rows):
                note_logprobs(self._runner, [live for live, _ in rows])
        for (live, feed), token in zip(rows, tokens, strict=True):
            self._fed(live, feed, token, now)
        for live, feed in alone:
            self._fed(live, feed, None, now)
        if self._scheduler.max_running < self._max_running:
            self._grow()

    def _rows(self, plan: list[tuple[Live, int]], now: float) -> tuple[list[Row], list[Row]]:
        """Those of a batch, and those that are read alone."""
        rows: list[Row] = []
        alone: list[Row] = []
        for live, count in plan:
            try:
                feed = row(live, count, self._matchers, self._vocab_size)
            except Exception:  # of a matcher
                self._break_off(live, now)
            else:
                (alone if live.alone else rows).append((live, feed))
        return rows, alone

    def _token(self, live: Live, feed: Feed, now: float) -> int:
        try:
            (token,) = self._runner.run([feed])
        except Exception:
            self._break_off(live, now)
            return NO_TOKEN
        if live.wants_logprobs:
            note_logprobs(self._runner, [live])
        return token

    def _break_off(self, live: Live, now: float) -> None:
        logger.exception("a request failed", extra={"request_id": live.request.request_id})  # noqa: LOG004 - the callers are handlers
        if live.phase is not Phase.FINISHED:
            self.endings.finish(live, "error", now, OWN_ERROR)

    def _shrink(self, now: float) -> None:
        """Fewer at once from now on, and the newest one goes; the others lose nothing."""
        running = self._scheduler.running
        self._scheduler.max_running = max(1, len(running) - 1)
        self._num_calm = 0
        live = next(live for live in reversed(self._live.values()) if live in running)
        logger.error("out of memory; limiting to %d concurrent requests", len(running) - 1)
        num_events = len(self.events)
        self.endings.finish(live, "cancelled", now)
        self.events[num_events:] = [Failed(id, OutOfMemory()) for id in live.request.ids]

    def _grow(self) -> None:
        """Dares one more request at once, from time to time."""
        self._num_calm += 1
        if self._num_calm == CALM_ROUNDS:
            self._num_calm = 0
            self._scheduler.max_running += 1

    # What comes of it

    def _fed(self, live: Live, feed: Feed, token: int | None, now: float) -> None:
        """``token`` is what the batch's run gave; None where the row is read alone, now."""
        if live.phase is not Phase.RUNNING:
            return
        session = live.session
        try:
            if token is None:
                token = read(self._runner, live, feed)
            session.advance(feed.tokens)
            self.usage[live.owner] += len(feed.tokens)
            if live.boundaries and live.boundaries[0] <= session.position:
                self._prompts.reach_boundary(live)
            if token == NOT_FINITE:
                self.endings.finish(live, "error", now, NOT_FINITE_ERROR)
                return
            if token >= 0:
                self._generated(live, token, now)
            elif not session.num_unfed:
                self.prompt_is_fed(live, now)
            if session.keep:
                self._keeper.save_if_due(session)
        except Exception:
            self._break_off(live, now)

    def prompt_is_fed(self, live: Live, now: float) -> None:
        """All but the last token of the text, which a generation feeds next."""
        request, session = live.request, live.session
        if live.draw is not None and live.scores is not None:
            self.events.append(_scored(live))
        if request.num_branches > 1 or request.continuations:
            self._branch(live, now)
        is_read = live.embedding is None or session.pending is None
        if live.draw is None and is_read and not session.num_unfed:
            self.endings.finish(live, None, now)

    def _branch(self, live: Live, now: float) -> None:
        """Each branch but the first continues from a copy of the session as it is now."""
        session = live.session
        first, *others = branches(live.request)
        state = self._sessions.state_of(session)
        for request in others:
            try:
                copy = self._keeper.copy(session, state, now)
            except CapacityExhausted as error:
                self.events.append(Failed(request.request_id, error))
                continue
            progress = Progress(request, copy.length)
            draw = None if request.sampling is None else self._runner.prepare(request.sampling)
            branch = Live.of(progress, copy, draw, self._eos_token_ids, not self._runner.grid)
            self._sessions.begin(copy, branch)
            copy.begin(request, request.tokens)
            self.start(branch)
        live.request = first
        session.begin(first, first.tokens)
        if first.score and first.sampling is None:
            live.start_scoring()

    def _generated(self, live: Live, token: int, now: float) -> None:
        session, stops, met, ended = live.session, live.stop_strings, False, False
        if session.constraint is not None:
            ended = session.constraint.accept(token, live.silent_ends, self._matchers)
        exact = session.constraint is not None
        text, thought = session.detokenizer.push(token, exact), None
        if stops is not None:
            text, met = stops.push(text)
        elif live.turn is not None:
            thought, text, met = live.turn.push(text)
            session.end_thinking(live.request, live.turn)
        session.pending = token
        session.seq += 1
        live.num_generated += 1
        live.num_in_turn += 1
        self.num_completion += 1
        request_id, position = live.request.request_id, session.position
        event = TokenEvent(request_id, session.seq, position, token, text)
        if live.num_top is not None:
            event = event._replace(logprob=live.logprob, top=live.top)
        if thought is not None:
            event = event._replace(thought=thought)
        self.events.append(event)
        if session.keep:
            session.log_index += 1
            self._keeper.records.append((session.id, event))
        if met or ended or live.is_end(token):
            self.endings.finish(live, "stop", now, drop_held=met, grammar_ended=ended)
        elif live.num_generated == live.max_tokens:
            self.endings.finish(live, "length", now)
        elif live.num_generated >= live.max_generated:
            self.park(live)
            self._sessions.rest(session, now)


def _scored(live: Live) -> Scored:
    """How likely the prompt was of a request that generates from now on."""
    request, tokens = live.request, live.prompt
    live.prompt, scores = (), live.stop_scoring()
    first = [None] * (len(tokens) - len(scores))
    logprobs = (*first, *(score.logprob for score in scores))
    tops = (*(() for _ in first), *(tuple(score.top) for score in scores))
    return Scored(request.request_id, tokens, logprobs, tops)
