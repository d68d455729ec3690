"""What the engine needs of whatever runs the model: one call per step.

There are two: `server.engine.native_runner` and, as the reference and for what
the native runtime does not cover, `server.engine.torch_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from server.engine.types import SamplingParams

#: In the place of a token: the model's output was not finite.
NOT_FINITE = -2

#: To which `Runner.embed` rounds; a float32 near one is no finer. Sums are exact below 2**29.
HIDDEN_UNIT = 2.0**-24

#: What a runner makes once of a request's parameters; opaque to all others.
Draw = Any

#: Bit ``i % 32`` of word ``i // 32`` says whether token i may be drawn: uint32, as many words as
#: the ids need or more.
Mask = npt.NDArray[np.uint32]


class Feed(NamedTuple):
    """One row of a step: ``tokens``, one or more, for the state of ``slot``.

    ``position`` counts the tokens that the state has seen. With a ``draw`` a token is sampled
    after each of the last ``num_draws`` of ``tokens``: after token i at position
    ``position + i + 1``. ``recent`` are the session's last tokens, all of these included, where
    a penalty needs them. ``allowed`` restricts the draws, one mask or None for each of them.
    ``wants_logprobs`` asks how likely the drawn tokens were. With a ``target``, one of
    `StatePool.spares`, the state goes there, and that of ``slot`` stays but for its past.
    """

    slot: int
    position: int
    tokens: Sequence[int]
    draw: Draw | None = None
    recent: Sequence[int] | None = None
    allowed: Sequence[Mask | None] | None = None
    num_draws: int = 1
    wants_logprobs: bool = False
    target: int | None = None


#: What a row gave, a plain tuple, because there is one for every token: its tokens, one for each
#: draw, or `NOT_FINITE` in the place of one; and, where the feed asks for them, as many
#: log-probabilities and lists of the most likely tokens: those of `TokenScore`, to the bit, NaN
#: and empty where there is no token.
RowOutput = tuple[Sequence[int], Sequence[float], Sequence[Sequence[tuple[int, float]]]]

#: Of a row that draws nothing.
NOTHING: RowOutput = ((), (), ())


class TokenScore(NamedTuple):
    """How likely a token was, and the most likely ones there: (id, log-probability), best first.

    Natural logarithms, at temperature 1 over the ids that exist, before bias,
    penalties, filters and mask. Of equal ones the lower id comes first. Where the
    model's output is not finite ``logprob`` is NaN and ``top`` empty.
    """

    logprob: float
    top: list[tuple[int, float]]


class Runner(Protocol):
    """The model on the rows of a state pool. Not thread-safe: the engine's thread owns it.

    ``grid`` has the chunk sizes, descending, on which prompts are cut, because
    another cut gives other bits; empty where every cut gives the same. With a grid a row
    draws one token at most.
    """

    @property
    def grid(self) -> tuple[int, ...]: ...

    def prepare(self, params: SamplingParams) -> Draw:
        """The draws of one request; ``params`` are checked by `server.engine.sampling`."""

    def run(self, feeds: Sequence[Feed]) -> list[RowOutput]:
        """Feeds every row, in place where it has no target; what each has drawn.

        No slot is in two rows. All or none: where it raises, whatever it is, no
        state has changed, so that the rows can be run again, also one by one.
        Raises `ValueError` for an ``allowed`` that allows no id that exists.
        """

    def score(self, feed: Feed, following: int, num_top: int = 0) -> list[TokenScore]:
        """Feeds one row as `run` does, but draws nothing, and says how likely its text was.

        ``feed.tokens`` are what `run` could be given: where there is a ``grid``,
        one of its sizes or a single token. Returns one for each of
        ``feed.tokens[1:]``, and for ``following``, which is not fed, after all
        before it, each with the ``num_top`` most likely tokens. Raises
        `ValueError`, before anything has changed, for a scored id that does not
        exist.
        """

    def embed(self, feed: Feed) -> npt.NDArray[np.float64]:
        """Feeds one row as `score` does; returns the sum of its tokens' last hidden states.

        [hidden_size]: what the final norm gives for each token, rounded to
        `HIDDEN_UNIT`, so that float64 adds them exactly: the sums of a text's parts
        add up to the same bits in any order, and without a ``grid`` for any cut. NaN
        where the model's output is not finite.
        """
