"""Runs the rows of a step: one call of the runner for all of them.

An error in one request ends that request alone: a call of the runner that fails has changed
nothing, and is repeated row by row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from server.engine.constraint import Matchers, OpenConstraint
from server.engine.drafter import Drafter
from server.engine.lifecycle import Phase
from server.engine.live import Live
from server.engine.requests import RequestTable
from server.engine.runner import NOT_FINITE, NOTHING, Feed, Mask, RowOutput, Runner
from server.engine.sampling import PENALTY_WINDOW
from server.engine.scheduler import Row, Scheduler
from server.engine.state_pool import StatePool
from server.engine.types import Failed
from server.errors import OutOfMemory

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
