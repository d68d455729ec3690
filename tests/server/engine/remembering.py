"""A runtime without a model that has a past: each step looks at all positions that it has seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from model.architectures.config import Config
from model.architectures.hybrid import SINKS
from model.state import StateLayout
from model.tensor_spec import POSITION_BLOCK
from tests.server.engine.reading import ReadingRuntime

#: A place that has held a position has a number of these bits, and not zero. Read as float16 it is
#: finite: a state that is not is never saved.
MARKS = 0x3F_3FFF_3FFF


class RememberingRuntime(ReadingRuntime):
    """Marks the place of each position; the third number of a state is the sum of all marks."""

    def __init__(self, vocab_size: int, config: Config) -> None:
        super().__init__(vocab_size)
        self._layout, self._context = StateLayout.of(config), config.context
        self._stops = config.past == "stop"

    def _row(
        self, state: npt.NDArray[np.int64], position: int, tokens: Sequence[int], *rest: Any
    ) -> list[int]:
        marks, is_poisoned = self._marks(state), state[0] == -1
        if not is_poisoned:
            seen = min(position, self._context)
            assert marks.sum() == state[2], (position, "a part of the past is another one")
            assert np.count_nonzero(marks) == seen, (position, "a part of the past is missing")
            assert not self._stops or position + len(tokens) <= self._context
        drawn = super()._row(state, position, tokens, *rest)
        if not is_poisoned:
            for place, token in zip(self._places(position, len(tokens)), tokens, strict=True):
                group, within = divmod(place, POSITION_BLOCK)
                mark = hash((token, int(state[0]))) & MARKS | 1
                state[2] += mark - marks[group, within]
                marks[group, within] = mark
        return drawn

    def _marks(self, state: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[blocks, positions]: at the beginning of each block of the past."""
        past = state[self._layout.fixed_bytes // 8 :]
        return past.reshape(self._layout.num_groups, -1)[:, :POSITION_BLOCK]

    def _places(self, position: int, count: int) -> list[int]:
        ring = self._context - SINKS
        return [
            p if p < self._context else SINKS + (p - SINKS) % ring
            for p in range(position, position + count)
        ]
