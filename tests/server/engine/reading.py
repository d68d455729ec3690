"""A runtime without a model that also says how probable tokens are, and what it thinks of them.

All of it hangs on every token before, as what `FakeRuntime` draws does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from server.engine.types import Top
from tests.fakes import FakeDraw, FakeRuntime, Hashed


def logprob_of(before: Hashed, token: int) -> float:
    """That of ``token`` after the text of ``before``."""
    return -(1 + (before.hash + 13 * token) % 97) / 16


def top_of(before: Hashed, num: int) -> Top:
    """The most probable ones there."""
    ids = [(before.hash + n) % 256 for n in range(num)]
    return tuple(sorted(((id, logprob_of(before, id)) for id in ids), key=lambda pair: -pair[1]))


def hidden_of(after: Hashed) -> npt.NDArray[np.float64]:
    """The last hidden state of the text's last token."""
    return np.array([1.0, after.hash % 1000, after.count])


class ReadingRuntime(FakeRuntime):
    """`FakeRuntime`, and the rest of what the native runtime does."""

    _draws: list[FakeDraw | None]

    def run(
        self,
        pool: npt.NDArray[np.uint8],
        slots: list[int],
        positions: list[int],
        tokens: list[Sequence[int]],
        draws: list[FakeDraw | None],
        **others: Any,
    ) -> list[list[int]]:
        drawn = super().run(pool, slots, positions, tokens, draws, **others)
        self._draws, self._drawn = draws, drawn
        return drawn

    def logprobs(self) -> list[list[float]]:
        rows = zip(self.before, self._drawn, strict=True)
        return [list(map(logprob_of, before, drawn)) for before, drawn in rows]

    def top_logprobs(self) -> list[list[list[tuple[int, float]]]]:
        return [
            [list(top_of(each, draw.params.top_logprobs or 0)) for each in before] if draw else []
            for before, draw in zip(self.before, self._draws, strict=True)
        ]

    def score_top(
        self,
        pool: npt.NDArray[np.uint8],
        slot: int,
        position: int,
        tokens: Sequence[int],
        following: int,
        num_top: int,
        source: npt.NDArray[np.uint8] | None = None,
    ) -> tuple[list[float], list[list[tuple[int, float]]]]:
        logprobs, tops = [], []
        after = (*tokens[1:], following)
        for index, (token, next_token) in enumerate(zip(tokens, after, strict=True)):
            after_token = self._read(pool, slot, position + index, token, source)
            logprobs.append(logprob_of(after_token, next_token))
            tops.append(list(top_of(after_token, num_top)))
        return logprobs, tops

    def embed(
        self,
        pool: npt.NDArray[np.uint8],
        slot: int,
        position: int,
        tokens: Sequence[int],
        source: npt.NDArray[np.uint8] | None = None,
    ) -> npt.NDArray[np.float64]:
        total = np.zeros(3)
        for index, token in enumerate(tokens):
            total += hidden_of(self._read(pool, slot, position + index, token, source))
        return total

    def _read(
        self,
        pool: npt.NDArray[np.uint8],
        slot: int,
        position: int,
        token: int,
        source: npt.NDArray[np.uint8] | None,
    ) -> Hashed:
        """Feeds one token; the text then."""
        super().run(pool, [slot], [position], [[token]], [None], sources=[source])
        state = pool[slot] if source is None else source
        return Hashed(*state.view(np.int64)[:2].tolist())
