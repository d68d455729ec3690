"""The native runtime behind the engine's protocol: a step is one call of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from server.engine.cpu_state_pool import CpuStatePool
from server.engine.runner import Draw, Feed, RowOutput, TokenScore
from server.engine.sampling import PENALTY_WINDOW, is_greedy
from server.engine.types import SamplingParams

if TYPE_CHECKING:
    from model.native.runtime import Runtime


class NativeRunner:
    """See `server.engine.runner.Runner`. Any cut of a prompt gives the same bits."""

    grid: tuple[int, ...] = ()

    def __init__(self, runtime: Runtime, pool: CpuStatePool) -> None:
        self._runtime, self._blocks, self._moved = runtime, pool.blocks, pool.moved

    def prepare(self, params: SamplingParams) -> Draw:
        return self._runtime.draw(
            temperature=0.0 if is_greedy(params) else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            typical_p=params.typical_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            seed=params.seed,
            logprob=params.logprob,
            top_logprobs=params.top_logprobs,
            penalty_window=PENALTY_WINDOW,
        )

    def run(self, feeds: Sequence[Feed]) -> list[RowOutput]:
        columns = map(list, zip(*feeds, strict=True))
        slots, positions, tokens, draws, recents, allowed, num_draws, wants_logprobs, to = columns
        moved = self._moved
        drawn = self._runtime.run(
            *(self._blocks, slots, positions, tokens, draws),
            recents=recents if any(recents) else None,
            allowed=allowed if any(masks is not None for masks in allowed) else None,
            num_draws=num_draws if any(num > 1 for num in num_draws) else None,
            sources=list(map(moved.get, slots)) if moved else None,
            targets=list(map(moved.get, to)) if moved else None,
        )
        if not any(wants_logprobs):
            return [(tokens, (), ()) for tokens in drawn]
        scores = self._runtime.logprobs(), self._runtime.top_logprobs()
        return list(zip(drawn, *scores, strict=True))

    def score(self, feed: Feed, following: int, num_top: int = 0) -> list[TokenScore]:
        slot, position, tokens = feed.slot, feed.position, feed.tokens
        row, source = (self._blocks, slot, position, tokens), self._moved.get(slot)
        found = self._runtime.score_top(*row, following, num_top, source)
        return list(map(TokenScore, *found))

    def embed(self, feed: Feed) -> npt.NDArray[np.float64]:
        row = self._blocks, feed.slot, feed.position, feed.tokens
        return self._runtime.embed(*row, self._moved.get(feed.slot))
