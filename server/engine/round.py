"""One round of the engine: who runs, one call of the runner, and what comes of each row.

An error in one request is that request's end and nobody else's: a call of the
runner that fails has changed nothing, and is repeated row by row.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import replace

from server.engine.errors import CapacityExhausted, EngineError, OutOfMemory
from server.engine.keeper import Keeper
from server.engine.lifecycle import Phase
from server.engine.live import Live
from server.engine.prefix_cache import PrefixCache, boundaries
from server.engine.runner import NO_TOKEN, NOT_FINITE, Feed, Runner
from server.engine.sampling import MAX_SEED, PENALTY_WINDOW
from server.engine.scheduler import Scheduler
from server.engine.sessions import Session, SessionTable
from server.engine.types import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Started,
    TokenEvent,
    Usage,
)
from server.engine.value import Progress

logger = logging.getLogger("everstream.engine")

NOT_FINITE_ERROR = "the model's output is not finite"
#: Rounds without a want of memory after which one more request may run.
CALM_ROUNDS = 256

OWN_ERROR = "the engine could not do this"


class Round:
    """The engine's requests in motion. ``events`` come out first in the next round."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler[Live],
        sessions: SessionTable,
        keeper: Keeper,
        prefixes: PrefixCache | None,
        live: dict[str, Live],
        eos_token_id: int,
    ) -> None:
        self.events: list[Event] = []
        self.cancelled: dict[Live, None] = {}
        self.num_prompt = self.num_completion = self.num_preempted = 0
        self.usage: Counter[str] = Counter()
        self._runner, self._scheduler = runner, scheduler
        self._max_running, self._num_calm = scheduler.max_running, 0
        self._sessions, self._keeper = sessions, keeper
        self._prefixes, self._live = prefixes, live
        self._eos_token_id = eos_token_id

    def play(self, now: float) -> list[Event]:
        """Cancels, admits, and runs one token or one chunk of each request; what happened."""
        for live in list(self.cancelled):
            self._finish(live, "cancelled", now)
        self._admit(now)
        if plan := self._scheduler.plan():
            self._run(plan, now)
        if self._scheduler.max_running < self._max_running:
            self._grow()
        events, self.events = self.events, []
        return events

    def live_of(self, progress: Progress, session: Session) -> Live:
        """The request of ``progress``, not begun."""
        params = progress.request.sampling
        draw = None if params is None else self._runner.prepare(params)
        return Live.of(progress, session, draw, self._eos_token_id, whole=not self._runner.grid)

    def start(self, session: Session) -> None:
        """What ``session`` runs waits for its turn from now on."""
        live = session.live
        assert live is not None, session
        self._live[live.request.request_id] = live
        self._scheduler.add(live)

    def expect(self, live: Live, prompt: tuple[int, ...]) -> None:
        """Notes where the prompt of an empty session will be worth keeping, or be copied."""
        if live.scores is not None:
            return
        if self._prefixes is not None:
            live.cached_at = boundaries(len(prompt), self._runner.grid)
        copied_at = (len(prompt) - 1,) if live.request.num_choices > 1 else ()
        places = {*live.cached_at, *copied_at}
        live.boundaries = deque(sorted(place for place in places if place))
        live.prompt = prompt if live.cached_at else ()

    def park(self, live: Live) -> None:
        """Takes the request out of its turn; the slot is for whoever needs it."""
        self._scheduler.remove(live)
        live.move(Phase.PARKED)
        self._sessions.release(live.session)

    def fail(self, live: Live, error: EngineError) -> None:
        """Takes the request out, wherever it is; what it has done is as if it had not been."""
        self._drop(live)
        self.events.extend(Failed(id, error) for id in live.request.ids)

    # Who runs

    def _admit(self, now: float) -> None:
        """Starts those that wait, as far as slots reach; long runners make room for them."""
        while (live := self._scheduler.next_waiting()) is not None:
            if not self._can_run(live):
                tired = self._scheduler.had_its_turn()
                if tired is None:
                    return
                self._preempt(tired)
                continue
            self._scheduler.start(live)
            live.move(Phase.RUNNING)
            live.num_in_turn = 0
            if not live.started:
                self._begin(live)
            if not live.session.num_owed:
                self._prompt_is_fed(live, now)

    def _can_run(self, live: Live) -> bool:
        room = len(self._scheduler.running) < self._scheduler.max_running
        return room and self._sessions.wake(live.session)

    def _preempt(self, live: Live) -> None:
        self.num_preempted += 1
        self._scheduler.remove(live)
        live.move(Phase.WAITING)
        self._sessions.release(live.session)
        self._scheduler.add(live)

    def _begin(self, live: Live) -> None:
        live.started = True
        session = live.session
        place = (live.length, session.epoch, session.seq)
        self.events.append(Started(live.request.request_id, session.id, *place))
        if live.prompt:
            self._skip_cached(live)

    # What it computes

    def _run(self, plan: list[tuple[Live, int]], now: float) -> None:
        rows = [(live, self._feed(live, count)) for live, count in plan if live.scores is None]
        for (live, feed), token in zip(rows, self._tokens(rows, now), strict=True):
            if live.phase is Phase.RUNNING:
                try:
                    self._fed(live, feed, token, now)
                except Exception:
                    self._break_off(live, now)
        for live, count in plan:
            if live.scores is not None and live.phase is Phase.RUNNING:
                try:
                    self._score(live, count, now)
                except Exception:
                    self._break_off(live, now)

    def _tokens(self, rows: list[tuple[Live, Feed]], now: float) -> list[int]:
        """One call for all rows; row by row where that fails, and fewer where memory does."""
        if not rows:
            return []
        try:
            tokens = self._runner.run([feed for _, feed in rows])
        except MemoryError:
            self._shrink(now)
            rows.clear()
            return []
        except Exception:
            return [self._token(live, feed, now) for live, feed in rows]
        self._add_logprobs(rows)
        return tokens

    def _token(self, live: Live, feed: Feed, now: float) -> int:
        try:
            (token,) = self._runner.run([feed])
        except Exception:
            self._break_off(live, now)
            return NO_TOKEN
        self._add_logprobs([(live, feed)])
        return token

    def _add_logprobs(self, rows: list[tuple[Live, Feed]]) -> None:
        if any(live.logprob_sum is not None for live, _ in rows):
            for (live, _), logprob in zip(rows, self._runner.logprobs(), strict=True):
                if live.logprob_sum is not None and logprob == logprob:  # a token was drawn
                    live.logprob_sum += logprob

    def _break_off(self, live: Live, now: float) -> None:
        logger.exception("a request failed", extra={"request_id": live.request.request_id})  # noqa: LOG004 - the callers are handlers
        if live.phase is not Phase.FINISHED:
            self._finish(live, "error", now, OWN_ERROR)

    def _shrink(self, now: float) -> None:
        """Fewer at once from now on, and the newest one goes; the others lose nothing."""
        running = self._scheduler.running
        self._scheduler.max_running = max(1, len(running) - 1)
        self._num_calm = 0
        live = next(live for live in reversed(self._live.values()) if live in running)
        logger.error("out of memory; at most %d requests at once now", len(running) - 1)
        num_events = len(self.events)
        self._finish(live, "cancelled", now)
        self.events[num_events:] = [Failed(id, OutOfMemory()) for id in live.request.ids]

    def _grow(self) -> None:
        """Dares one more request at once, from time to time."""
        self._num_calm += 1
        if self._num_calm == CALM_ROUNDS:
            self._num_calm = 0
            self._scheduler.max_running += 1

    def _feed(self, live: Live, count: int) -> Feed:
        session = live.session
        slot, pending = session.slot, session.pending
        assert slot is not None and pending is not None, session
        tokens = session.next(count) if session.num_owed else [pending]
        draw = live.draw if count > session.num_owed else None
        recent = None
        if live.penalized and draw is not None:
            recent = [*session.recent, *tokens][-PENALTY_WINDOW:]
        return Feed(slot, session.position, tokens, draw, recent)

    def _score(self, live: Live, count: int, now: float) -> None:
        """Feeds a chunk of a prompt and notes how probable its tokens were."""
        assert live.scores is not None
        session = live.session
        feed = self._feed(live, count)
        scores = self._runner.score(feed, session.next(count + 1)[-1])
        live.scores += scores[max(0, live.length - session.position - 1) :]
        finite = all(score == score for score in scores)
        self._fed(live, feed, NO_TOKEN if finite else NOT_FINITE, now)

    # What comes of it

    def _fed(self, live: Live, feed: Feed, token: int, now: float) -> None:
        session = live.session
        session.advance(feed.tokens)
        self.usage[live.owner] += len(feed.tokens)
        if live.boundaries and live.boundaries[0] <= session.position:
            self._reach_boundary(live)
        if token == NOT_FINITE:
            self._finish(live, "error", now, NOT_FINITE_ERROR)
            return
        if token >= 0:
            self._generated(live, token, now)
        elif not session.num_owed:
            self._prompt_is_fed(live, now)
        if session.keep:
            self._keeper.save_if_due(session)

    def _prompt_is_fed(self, live: Live, now: float) -> None:
        """All but the last token of the text, which a generation feeds next."""
        if live.draw is None:
            self._finish(live, None, now)
        elif live.request.num_choices > 1:
            self._branch(live, now)

    def _generated(self, live: Live, token: int, now: float) -> None:
        session, stops, met = live.session, live.stop_strings, False
        text = session.detokenizer.push(token)
        if stops is not None:
            text, met = stops.push(text)
        session.pending = token
        session.seq += 1
        live.num_generated += 1
        live.num_in_turn += 1
        self.num_completion += 1
        request_id, position = live.request.request_id, session.position
        event = TokenEvent(request_id, session.seq, position, token, text)
        self.events.append(event)
        if session.keep:
            session.log_index += 1
            self._keeper.records.append((session.id, event))
        if met or token in live.ends:
            self._finish(live, "stop", now, drop_held=met)
        elif live.num_generated == live.max_tokens:
            self._finish(live, "length", now)
        elif live.num_generated >= live.max_generated:
            self.park(live)
            self._sessions.rest(session, now)

    def _finish(
        self,
        live: Live,
        reason: FinishReason | None,
        now: float,
        error: str | None = None,
        drop_held: bool = False,
    ) -> None:
        """Takes the request out, wherever it is, and lets its session go idle or close.

        A state that an error has touched cannot be trusted: the session leaves
        without being saved, and a store goes on from what it has.
        """
        request, session = live.request, live.session
        self._drop(live)
        text = live.stop_strings.flush() if live.stop_strings and not drop_held else ""
        if not session.keep and not drop_held:
            text += session.detokenizer.flush()
        if request.sampling is not None:
            session.seq += 1
        within_prompt = session.num_owed or not live.started
        if within_prompt and not live.num_generated:  # a restored one may owe what it generated
            begun = session.position >= max(live.length, 1)
            session.cut(session.position + 1 if begun else live.length)
        usage = Usage(session.length - live.length - live.num_generated, live.num_generated)
        self.num_prompt += usage.prompt_tokens
        finished = Finished(
            request.request_id,
            session.id if session.keep else None,
            session.seq,
            session.length,
            text,
            reason,
            usage,
            error,
            None if live.scores is None else tuple(live.scores),
            live.logprob_sum,
        )
        self.events.append(finished)
        for choice in request.ids[1:]:  # it ends before they began
            self.events.append(replace(finished, request_id=choice, usage=Usage(0, 0)))
        session.log_index += 1
        self._keeper.record(session, finished)
        if reason == "error":
            self._sessions.close(session)
        else:
            self._sessions.end(session, now)

    def _drop(self, live: Live) -> None:
        """The request is live no more; its session is left to the caller."""
        if not live.parked:
            self._scheduler.remove(live)
        live.move(Phase.FINISHED)
        live.session.live = None
        del self._live[live.request.request_id]
        self.cancelled.pop(live, None)

    # Prompts that are fed once for several requests

    def _skip_cached(self, live: Live) -> None:
        """Takes the state of the longest prefix that is known, instead of feeding it."""
        if self._prefixes is None:
            return
        hit = self._prefixes.lookup(live.request.owner, live.prompt)
        if hit is None:
            return
        session = live.session
        self._sessions.put(session, hit.block)
        session.advance(live.prompt[: hit.num_tokens])
        while live.boundaries and live.boundaries[0] <= session.position:
            live.boundaries.popleft()

    def _reach_boundary(self, live: Live) -> None:
        session = live.session
        place = live.boundaries.popleft()
        if place != session.position or place not in live.cached_at:
            return
        state = self._sessions.state_of(session)
        assert state is not None and self._prefixes is not None
        if self._sessions.is_finite(state):
            self._prefixes.insert(live.request.owner, live.prompt[: session.position], state)

    def _branch(self, live: Live, now: float) -> None:
        """Each choice but the first goes on from a copy of the session as it is now."""
        request, session = live.request, live.session
        num_choices, params = request.num_choices, request.sampling
        assert params is not None
        live.request = replace(request, num_choices=1)
        state = self._sessions.state_of(session)
        for index in range(1, num_choices):
            seed = (params.seed + index) & MAX_SEED
            choice = replace(
                live.request,
                request_id=f"{request.request_id}/{index}",
                sampling=replace(params, seed=seed),
                tokens=(),
            )
            try:
                copy = self._keeper.copy(session, state, now)
            except CapacityExhausted as error:
                self.events.append(Failed(choice.request_id, error))
                continue
            self._sessions.begin(copy, self.live_of(Progress(choice, copy.length), copy))
            self.start(copy)
