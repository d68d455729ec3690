"""The native runtime behind the engine's protocol: a step is one call of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from server.engine.runner import Draw, Feed
from server.engine.state_pool import StatePool
from server.engine.types import SamplingParams

if TYPE_CHECKING:
    from model.ops.cpu.runtime import Runtime


class NativeRunner:
    """See `server.engine.runner.Runner`. Any cut of a prompt gives the same bits."""

    grid: tuple[int, ...] = ()

    def __init__(self, runtime: Runtime, pool: StatePool) -> None:
        self._runtime, self._blocks = runtime, pool.blocks

    def prepare(self, params: SamplingParams) -> Draw:
        return self._runtime.draw(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=params.seed,
            logprob=params.logprob,
        )

    def run(self, feeds: Sequence[Feed]) -> list[int]:
        slots, positions, tokens, draws, recents = map(list, zip(*feeds, strict=True))
        some = recents if any(recents) else None
        return self._runtime.run(self._blocks, slots, positions, tokens, draws, some)

    def logprobs(self) -> list[float]:
        return self._runtime.logprobs()

    def score(self, feed: Feed, following: int) -> list[float]:
        slot, position, tokens = feed.slot, feed.position, feed.tokens
        return self._runtime.score(self._blocks, slot, position, tokens, following)
