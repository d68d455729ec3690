"""The rows of a step: what the runner is given of each request, and what it says about it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from server.engine.constraint import Matchers
from server.engine.live import Live
from server.engine.runner import NO_TOKEN, NOT_FINITE, Feed, Runner
from server.engine.sampling import PENALTY_WINDOW


def row(live: Live, count: int, matchers: Matchers, vocab_size: int) -> Feed:
    """The next ``count`` tokens of a request, and its draw where the last one is among them.

    Raises what the matcher of its session's grammar raises.
    """
    session = live.session
    slot, pending = session.slot, session.pending
    assert slot is not None and pending is not None, session
    tokens = session.next(count) if session.num_unfed else [pending]
    draw = live.draw if count > session.num_unfed else None
    recent = allowed = None
    if draw is not None:
        if live.penalized:
            recent = [*session.recent, *tokens][-PENALTY_WINDOW:]
        if session.constraint is not None:
            budget = live.max_tokens - live.num_generated
            allowed = session.constraint.allowed(matchers, budget, live.silent_ends)
        elif live.turn is not None:
            allowed = live.turn.allowed(vocab_size, live.ends)
    return Feed(slot, session.position, tokens, draw, recent, allowed)


def note_logprobs(runner: Runner, lives: Sequence[Live]) -> None:
    """Notes how likely the tokens of the last run were, whose rows were those of ``lives``."""
    for live, logprob, top in zip(lives, runner.logprobs(), runner.top_logprobs(), strict=True):
        if not live.wants_logprobs or logprob != logprob:  # no token was drawn
            continue
        live.logprob, live.top = logprob, tuple(top)
        if live.logprob_sum is not None:
            live.logprob_sum += logprob


def read(runner: Runner, live: Live, feed: Feed) -> int:
    """Feeds the row of a prompt that is scored or embedded; what `Runner.run` would say."""
    session = live.session
    if live.embedding is not None:
        live.embedding = live.embedding + runner.embed(feed)
        return NO_TOKEN if np.isfinite(live.embedding).all() else NOT_FINITE
    assert live.scores is not None
    following = session.next(len(feed.tokens) + 1)[-1]
    scores = runner.score(feed, following, live.request.num_top)
    live.scores += scores[max(0, live.length - session.position - 1) :]
    return NO_TOKEN if all(score.logprob == score.logprob for score in scores) else NOT_FINITE
