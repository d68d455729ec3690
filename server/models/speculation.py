"""Whether drafts pay for a model on this machine: calls of several rows are timed at start."""

from __future__ import annotations

import logging
import time

from model.architectures.config import Config
from model.checkpoint import Checkpoint
from model.state import StateLayout
from server.engine.cpu_state_pool import CpuStatePool
from server.engine.draft_costs import MEASURED_ROWS, DraftCosts
from server.engine.drafter import Drafter
from server.engine.model_drafter import ModelDrafter
from server.engine.runner import Feed, Runner
from server.engine.suffix_drafter import MAX_DRAFTS, MAX_STREAMS, SuffixDrafter
from server.engine.types import SamplingParams
from server.models.backend import Backend

logger = logging.getLogger("everstream.speculation")

#: Of so many rounds the shortest time counts: the others were disturbed. No more are begun after
#: this time, since a large model waits for them.
NUM_ROUNDS, MAX_ROUNDS_S = 3, 1.0


class DraftModelError(ValueError):
    """A draft model that cannot draft for a model. The message begins with its flag."""


def open_drafter(backend: Backend, draft: Backend | None = None) -> Drafter | None:
    """What drafts for ``backend``; None where its bits depend on chunks, or no draft would pay.

    ``draft`` is a small model that `check_draft_model` has accepted.
    """
    if backend.name == "torch":  # whose runner also takes long to make
        logger.debug("no tokens are drafted: on torch the bits depend on the chunks")
        return None
    pool = CpuStatePool(StateLayout.of(backend.config), 1)
    runner = backend.make_runner(pool)
    costs = measured_costs(runner, pool)
    times = ", ".join(f"{seconds * 1000:.2f}" for seconds in costs.times_s)
    pays = costs.ever_pays(MAX_DRAFTS)
    logger.debug(
        "%s: calls of %s rows take %s ms",
        "tokens are drafted where that pays" if pays else "no tokens are drafted, it would not pay",
        *(", ".join(map(str, costs.rows)), times),
    )
    if not pays:
        return None
    past = SuffixDrafter(costs, backend.tokenizer.token_bytes)
    return past if draft is None else _with_model(past, draft)


def _with_model(past: SuffixDrafter, draft: Backend) -> Drafter:
    """Without the small model where its drafts, were they always right, would not pay."""
    pool = CpuStatePool(StateLayout.of(draft.config), MAX_STREAMS)
    runner = draft.make_runner(pool)
    draft_s = measured_costs(runner, pool).times_s[0]
    costs = past.costs.with_drafts_of(draft_s)
    pays = costs.ever_pays(MAX_DRAFTS)
    logger.info(
        "the draft model takes %.2f ms for a draft: %s",
        *(draft_s * 1000, "it drafts where that pays" if pays else "it drafts none"),
    )
    return ModelDrafter(past, runner, pool, costs) if pays else past


def draft_state_bytes(config: Config) -> int:
    """Of the states of a small model: one for each stream that drafts are made for."""
    return MAX_STREAMS * StateLayout.of(config).num_bytes


def check_draft_model(checkpoint: Checkpoint, draft: Checkpoint) -> None:
    """Raises `DraftModelError` where ``draft`` cannot draft for ``checkpoint``."""
    if draft.config.context:
        raise DraftModelError("--draft-model: a model with attention layers cannot draft")
    mine, theirs = checkpoint.tokenizer, draft.tokenizer
    if mine.vocab_size != theirs.vocab_size or any(
        mine.token_bytes(id) != theirs.token_bytes(id) for id in range(mine.vocab_size)
    ):
        raise DraftModelError("--draft-model: it has another vocabulary than the model")


def measured_costs(runner: Runner, pool: CpuStatePool) -> DraftCosts:
    """Times calls of one stream that draw after each row, in place and with a spare as target.

    What the second kind takes longer is the mean over all numbers of rows: single calls vary by
    more.
    """
    slot = pool.allocate()
    assert slot is not None, pool
    draw = runner.prepare(SamplingParams(temperature=0.0))
    position = most = MEASURED_ROWS[-1]
    tokens = [1] * most
    runner.run([Feed(slot, 0, tokens, draw, num_draws=most)])
    (spare,) = pool.spares([(slot, position, most)])
    calls = {(rows, to): float("inf") for rows in MEASURED_ROWS for to in (None, spare)}
    start_s = time.perf_counter()
    for number in range(NUM_ROUNDS):
        if number and time.perf_counter() - start_s > MAX_ROUNDS_S:
            break
        for rows, target in calls:
            feed = Feed(slot, position, tokens[:rows], draw, num_draws=rows, target=target)
            begin_s = time.perf_counter()
            runner.run([feed])
            calls[rows, target] = min(calls[rows, target], time.perf_counter() - begin_s)
    pool.free(slot)
    times_s, kept_s = ([calls[rows, to] for rows in MEASURED_ROWS] for to in (None, spare))
    return DraftCosts(times_s, max(0.0, sum(kept_s) - sum(times_s)) / len(MEASURED_ROWS))
