"""One step: the call of the runner for all its rows, and what comes of each."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from server.engine.drafts import Drafter
from server.engine.kept import Keeper
from server.engine.prefixes import Prompts, branches
from server.engine.request import Live, Phase
from server.engine.runner import NOT_FINITE, NOTHING, Feed, Mask, RowOutput, Runner, StatePool
from server.engine.sampling import PENALTY_WINDOW
from server.engine.scheduler import Row, Scheduler
from server.engine.session import Matchers, OpenConstraint, Progress
from server.engine.tables import RequestTable, SessionTable
from server.engine.types import Failed, FinishReason, Scored, TokenEvent
from server.errors import CapacityExhausted, OutOfMemory

# -------------------------------------------------------------------------------------------------
# Runs the rows of a step: one call of the runner for all of them.
#
# An error in one request ends that request alone: a call of the runner that fails has changed
# nothing, and is repeated row by row.


logger = logging.getLogger("everstream.engine")

#: Steps without a lack of memory after which one more request may run.
CALM_STEPS = 256

#: A row of a step: its request, what it was fed, and what came of it.
Result = tuple[Live, Feed, RowOutput]


class Executor:
    """Turns rows of the plan into feeds, runs them, and copes with what fails."""

    def __init__(
        self,
        runner: Runner,
        pool: StatePool,
        scheduler: Scheduler[Live],
        requests: RequestTable,
        matchers: Matchers,
        vocab_size: int,
        drafter: Drafter | None,
    ) -> None:
        self._runner, self._pool, self._requests = runner, pool, requests
        self._scheduler, self._max_running = scheduler, scheduler.max_running
        self._num_calm = 0
        self._matchers, self._vocab_size, self._drafter = matchers, vocab_size, drafter

    def run(self, plan: list[Row[Live]], now: float) -> list[Result]:
        """What each row gave; without those of requests that have ended by an error."""
        batch: list[Live] = []
        feeds: list[Feed] = []
        alone: list[tuple[Live, Feed]] = []
        for row in plan:
            live = row[0]
            try:
                feed = self._feed(row)
            except Exception:  # of a matcher
                self._requests.break_off(live, now)
            else:
                if live.alone:
                    alone.append((live, feed))
                else:
                    batch.append(live)
                    feeds.append(feed)
        results = self._run_batch(batch, feeds, now) if batch else []
        for live, feed in alone:
            if live.phase is Phase.RUNNING:
                try:
                    results.append((live, feed, self._read(live, feed)))
                except Exception:
                    self._requests.break_off(live, now)
        if self._scheduler.max_running < self._max_running:
            self._grow()
        return results

    def _run_batch(self, batch: list[Live], feeds: list[Feed], now: float) -> list[Result]:
        try:
            self._aim(feeds)
            outputs = self._runner.run(feeds)
        except MemoryError:
            self._shrink(now)
            return []
        except Exception:
            return self._run_apart(batch, feeds, now)
        return list(zip(batch, feeds, outputs, strict=True))

    def _aim(self, feeds: list[Feed]) -> None:
        """Gives rows with drafts a target: their states stay until the drafts are known."""
        drafted = [place for place, feed in enumerate(feeds) if feed.num_draws > 1]
        if drafted:
            rows = [feeds[place] for place in drafted]
            spares = self._pool.spares([(f.slot, f.position, len(f.tokens)) for f in rows])
            for place, feed, spare in zip(drafted, rows, spares, strict=True):
                feeds[place] = feed._replace(target=spare)

    def _run_apart(self, batch: list[Live], feeds: list[Feed], now: float) -> list[Result]:
        results: list[Result] = []
        for live, feed in zip(batch, feeds, strict=True):
            try:
                (output,) = self._runner.run([feed])
            except Exception:
                self._requests.break_off(live, now)
            else:
                results.append((live, feed, output))
        return results

    def _shrink(self, now: float) -> None:
        """Fewer at once from now on, and the newest one goes; the others lose nothing."""
        running = self._scheduler.running
        self._scheduler.max_running = max(1, len(running) - 1)
        self._num_calm = 0
        live = next(live for live in reversed(list(self._requests)) if live in running)
        logger.error("out of memory; limiting to %d concurrent requests", len(running) - 1)
        events = self._requests.events
        num_events = len(events)
        self._requests.finish(live, "cancelled", now)
        events[num_events:] = [Failed(id, OutOfMemory()) for id in live.request.ids]

    def _grow(self) -> None:
        """One more request may run at once, from time to time."""
        self._num_calm += 1
        if self._num_calm == CALM_STEPS:
            self._num_calm = 0
            self._scheduler.max_running += 1

    # One row

    def _feed(self, row: Row[Live]) -> Feed:
        """The tokens of a row, its drafts last, and its draws where the text's last token is fed.

        Raises what the matcher of its session's grammar raises.
        """
        live, num_tokens, num_drafts = row
        session = live.session
        slot, pending = session.slot, session.pending
        assert slot is not None and pending is not None, session
        tokens = session.next(num_tokens) if session.num_unfed else [pending]
        if live.draw is None or num_tokens <= session.num_unfed:
            return Feed(slot, session.position, tokens)
        drafts: Sequence[int] = live.drafts[:num_drafts]
        allowed: Sequence[Mask] | None = None
        if session.constraint is not None:
            allowed, drafts = self._masks(live, session.constraint, num_drafts)
        elif live.turn is not None:
            mask = live.turn.allowed(self._vocab_size, live.ends)
            allowed = None if mask is None else (mask,)
        if drafts:
            tokens = [*tokens, *drafts]
        recent = None
        if live.penalized:
            recent = [*session.recent, *tokens][-PENALTY_WINDOW - len(drafts) :]
        num_draws, wants = 1 + len(drafts), live.wants_logprobs
        return Feed(slot, session.position, tokens, live.draw, recent, allowed, num_draws, wants)

    def _masks(
        self, live: Live, constraint: OpenConstraint, num_drafts: int
    ) -> tuple[list[Mask], list[int]]:
        """The mask of each draw, and the drafts before the draws: such as may be drawn."""
        matchers, ends, budget = self._matchers, live.silent_ends, live.budget
        masks, drafts = [constraint.allowed(matchers, budget, ends)], list[int]()
        place = constraint.copy() if num_drafts else constraint
        while len(drafts) < num_drafts:
            assert self._drafter is not None
            draft = self._drafter.next_draft(live, drafts, masks[-1])
            try:
                if draft is None or place.accept(draft, ends, matchers):
                    break
                masks.append(place.allowed(matchers, budget - len(masks), ends))
            except Exception:  # the text may not come to where the matcher fails
                break
            drafts.append(draft)
        return masks, drafts

    def _read(self, live: Live, feed: Feed) -> RowOutput:
        """Feeds the row of a prompt that is scored or embedded."""
        session = live.session
        if live.embedding is not None:
            live.embedding = live.embedding + self._runner.embed(feed)
            is_finite = bool(np.isfinite(live.embedding).all())
        else:
            assert live.scores is not None
            following = session.next(len(feed.tokens) + 1)[-1]
            scores = self._runner.score(feed, following, live.request.num_top)
            live.scores += scores[max(0, live.length - session.position - 1) :]
            is_finite = all(score.logprob == score.logprob for score in scores)
        return NOTHING if is_finite else ((NOT_FINITE,), (), ())


# -------------------------------------------------------------------------------------------------
# What comes of a step's rows: tokens become text, events, records and ends of requests.


class End(NamedTuple):
    """Why a row's tokens end here. Without a ``reason`` the request is parked."""

    reason: FinishReason | None = None
    error: str | None = None
    drop_held: bool = False
    grammar_ended: bool = False


NOT_FINITE_END = End("error", "the model's output is not finite")


class OutputProcessor:
    """One loop over lists of tokens. ``usage`` counts the tokens computed for each owner.

    ``longest`` is the greatest number of tokens that one request has got in the last step.
    """

    def __init__(
        self,
        requests: RequestTable,
        sessions: SessionTable,
        keeper: Keeper,
        prompts: Prompts,
        pool: StatePool,
        matchers: Matchers,
    ) -> None:
        self.num_generated = self.num_accepted = self.num_rejected = 0
        self.num_accepted_of_model = self.num_rejected_of_model = 0  # of these
        self.longest = 1
        self.usage: dict[str, int] = {}
        self._requests, self._sessions, self._keeper = requests, sessions, keeper
        self._prompts, self._pool, self._matchers = prompts, pool, matchers

    def process(self, results: list[Result], now: float) -> None:
        """An error in one request ends that request alone."""
        self.longest = 1
        for live, feed, output in results:
            if live.phase is Phase.RUNNING:
                try:
                    self._process(live, feed, output, now)
                except Exception:
                    self._requests.break_off(live, now)

    def _process(self, live: Live, feed: Feed, output: RowOutput, now: float) -> None:
        session, tokens = live.session, output[0]
        end = None
        if feed.num_draws > 1:
            end = self._accept_drafts(live, feed, output)
        else:
            self._advance(live, feed)
            if tokens:
                end = self._accept(live, tokens[0], output, 0)
            elif not session.num_unfed:
                self.prompt_is_fed(live, now)
        if end is not None:
            self._end(live, end, now)
        if session.keep and (end is None or end.reason != "error"):
            self._keeper.save_if_due(session)

    def _accept_drafts(self, live: Live, feed: Feed, output: RowOutput) -> End | None:
        """Takes the tokens up to the first that ends the text or is not what was drafted.

        Those that count are known before the state is said to have seen them.
        """
        assert feed.target is not None, feed
        tokens, num_drafts, end, num_right = output[0], feed.num_draws - 1, None, 0
        num_before = live.num_generated
        for place, token in enumerate(tokens):
            end = self._accept(live, token, output, place)
            is_right = place < num_drafts and token == feed.tokens[place - num_drafts]
            num_right += is_right
            if end is not None or not is_right:
                break
        num_taken = live.num_generated - num_before
        self.longest = max(self.longest, num_taken)
        self._count(live, min(num_taken, num_right), num_drafts)
        if num_taken == feed.num_draws:
            self._pool.swap(feed.slot, feed.target)
            self._advance(live, feed)
        else:  # the tokens stay unfed, and the next row begins with them
            self._pool.restore(feed.slot)
        return end

    def _count(self, live: Live, num_accepted: int, num_drafts: int) -> None:
        num_rejected = num_drafts - num_accepted
        live.num_accepted += num_accepted
        live.num_rejected += num_rejected
        self.num_accepted += num_accepted
        self.num_rejected += num_rejected
        if live.drafts_of_model:
            self.num_accepted_of_model += num_accepted
            self.num_rejected_of_model += num_rejected

    def _advance(self, live: Live, feed: Feed) -> None:
        """The state has seen the row's tokens."""
        live.session.advance(feed.tokens)
        self.usage[live.owner] = self.usage.get(live.owner, 0) + len(feed.tokens)
        if live.boundaries and live.boundaries[0] <= live.session.position:
            self._prompts.reach_boundary(live)

    def _end(self, live: Live, end: End, now: float) -> None:
        if end.reason is None:
            self._requests.park(live)
            self._sessions.rest(live.session, now)
        else:
            self._requests.finish(live, end.reason, now, *end[1:])

    # Tokens

    def _accept(self, live: Live, token: int, output: RowOutput, place: int) -> End | None:
        """One more token of the text: its event and its record; whether it is the last one."""
        if token == NOT_FINITE:
            return NOT_FINITE_END
        session, stops, met, ended = live.session, live.stop_strings, False, False
        exact = session.constraint is not None
        if session.constraint is not None:
            ended = session.constraint.accept(token, live.silent_ends, self._matchers)
        text, thought = session.detokenizer.push(token, exact), None
        if stops is not None:
            text, met = stops.push(text)
        elif live.turn is not None:
            thought, text, met = live.turn.push(text)
            session.end_thinking(live.request, live.turn)
        if session.pending is None:
            position, session.pending = session.position, token
        else:  # after a draft: the state has not seen the tokens before
            position = session.length
            session.hold(token)
        session.seq += 1
        live.num_generated += 1
        live.num_in_turn += 1
        self.num_generated += 1
        event = TokenEvent(live.request.request_id, session.seq, position, token, text)
        if live.wants_logprobs:
            event = _with_logprob(event, live, output, place)
        if thought is not None:
            event = event._replace(thought=thought)
        self._requests.events.append(event)
        if session.keep:
            session.log_index += 1
            self._sessions.records.append((session.id, event))
        if met or ended or live.is_end(token):
            return End("stop", drop_held=met, grammar_ended=ended)
        if live.num_generated >= live.max_tokens:
            return End("length")
        return End() if live.num_generated >= live.max_generated else None

    # Prompts

    def prompt_is_fed(self, live: Live, now: float) -> None:
        """All but the last token of the text, which a generation feeds next."""
        request, session = live.request, live.session
        if live.draw is not None and live.scores is not None:
            self._requests.events.append(_scored(live))
        if request.num_branches > 1 or request.continuations:
            self._branch(live, now)
        is_read = live.embedding is None or session.pending is None
        if live.draw is None and is_read and not session.num_unfed:
            self._requests.finish(live, None, now)

    def _branch(self, live: Live, now: float) -> None:
        """Each branch but the first continues from a copy of the session as it is now."""
        session = live.session
        first, *others = branches(live.request)
        state = self._sessions.state_of(session)
        for request in others:
            try:
                copy = self._keeper.copy(session, state, now)
            except CapacityExhausted as error:
                self._requests.events.append(Failed(request.request_id, error))
                continue
            branch = self._requests.new(Progress(request, copy.length), copy)
            branch.num_bytes = 0  # it shares the first one's
            self._sessions.begin(copy, branch)
            copy.begin(request, request.tokens)
            self._requests.add(branch)
        live.request = first
        session.begin(first, first.tokens)
        if first.score and first.sampling is None:
            live.start_scoring()


def _with_logprob(event: TokenEvent, live: Live, output: RowOutput, place: int) -> TokenEvent:
    """Notes how likely the token was; it is shown where the request asks for it in each event."""
    logprob = output[1][place]
    assert not math.isnan(logprob), event
    if live.logprob_sum is not None:
        live.logprob_sum += logprob
    if live.num_top is None:
        return event
    return event._replace(logprob=logprob, top=tuple(output[2][place]))


def _scored(live: Live) -> Scored:
    """How likely the prompt was of a request that generates from now on."""
    request, tokens = live.request, live.prompt
    live.prompt, scores = (), live.stop_scoring()
    first = [None] * (len(tokens) - len(scores))
    logprobs = (*first, *(score.logprob for score in scores))
    tops = (*(() for _ in first), *(tuple(score.top) for score in scores))
    return Scored(request.request_id, tokens, logprobs, tops)


# -------------------------------------------------------------------------------------------------
# How much of a step grammars may take: where they take more, their rows continue in turn.
#
# The mask of a client's grammar takes some microseconds, or some tens of milliseconds: of all
# running requests together that would be seconds, for which every other request waits. Matchers
# measure what they take. In which step a row gets its token changes no token.


#: Of a step, for all rows under grammars; one row continues in any case.
BUDGET_S = 0.03

Plan = list[Row[Live]]


class GrammarTurns:
    """Chooses the rows of a step. Owners take turns, and the requests of an owner do."""

    def __init__(self) -> None:
        self._num_chosen = 0
        self._last: dict[str, int] = {}  # when each owner had its last turn

    def choose(self, plan: Plan, running: dict[Live, None]) -> Plan:
        """``plan`` without the rows for which this step has no time.

        Those that are in it go to the back of ``running``.
        """
        costs = {row[0]: _cost_s(row) for row in plan if _wants_mask(row)}
        if sum(costs.values()) <= BUDGET_S:
            return plan
        chosen = self._in_turn(costs)
        for live in chosen:
            del running[live]
            running[live] = None
        return [row for row in plan if row[0] not in costs or row[0] in chosen]

    def _in_turn(self, costs: dict[Live, float]) -> set[Live]:
        queues: dict[str, deque[Live]] = {}
        for live in costs:
            queues.setdefault(live.owner, deque()).append(live)
        self._last = {owner: self._last.get(owner, 0) for owner in queues}
        chosen: set[Live] = set()
        spent_s = 0.0
        while queues:
            owner = min(queues, key=self._last.__getitem__)
            live = queues[owner].popleft()
            spent_s += costs[live]
            if chosen and spent_s > BUDGET_S:
                break
            chosen.add(live)
            self._num_chosen += 1
            self._last[owner] = self._num_chosen
            if not queues[owner]:
                del queues[owner]
        return chosen


def _wants_mask(row: Row[Live]) -> bool:
    live, num_tokens, _ = row
    session = live.session
    if session.constraint is None or live.draw is None:
        return False
    return num_tokens > session.num_unfed


def _cost_s(row: Row[Live]) -> float:
    """One mask for each draw."""
    live, _, num_drafts = row
    constraint = live.session.constraint
    assert constraint is not None, row
    return constraint.cost_s + num_drafts * constraint.draft_cost_s
