"""What comes of a step's rows: tokens become text, events, records and ends of requests."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from server.engine.constraint import Matchers
from server.engine.executor import Result
from server.engine.keeper import Keeper
from server.engine.lifecycle import Phase
from server.engine.live import Live
from server.engine.prompts import Prompts, branches
from server.engine.requests import RequestTable
from server.engine.runner import NOT_FINITE, Feed, RowOutput
from server.engine.sessions import SessionTable
from server.engine.state_pool import StatePool
from server.engine.types import Failed, FinishReason, Scored, TokenEvent
from server.engine.value import Progress
from server.errors import CapacityExhausted


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
        self.usage: Counter[str] = Counter()
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
        self.usage[live.owner] += len(feed.tokens)
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
