"""What the engine needs of whatever runs the model: one call per step.

There are two: `server.engine.native_runner` and, as the reference and for what
the native runtime does not cover, `server.engine.torch_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from server.engine.types import SamplingParams

#: In the place of a token: none was wanted, or the model's output was not finite.
NO_TOKEN, NOT_FINITE = -1, -2

#: What a runner makes once of a request's parameters; nobody else looks inside.
Draw = Any


class Feed(NamedTuple):
    """One row of a step: ``tokens``, one or more, for the state of ``slot``.

    ``position`` counts the tokens that the state has seen. With a ``draw`` the
    next token is sampled, at position ``position + len(tokens)``; ``recent``
    are the session's last tokens, these included, where a penalty needs them.
    """

    slot: int
    position: int
    tokens: Sequence[int]
    draw: Draw | None = None
    recent: Sequence[int] | None = None


class Runner(Protocol):
    """The model on the rows of a state pool. Not thread-safe: the engine's thread owns it.

    ``grid`` has the chunk sizes, descending, on which prompts are cut, because
    another cut gives other bits; empty where every cut gives the same.
    """

    @property
    def grid(self) -> tuple[int, ...]: ...

    def prepare(self, params: SamplingParams) -> Draw:
        """The draws of one request; ``params`` are checked by `server.engine.sampling`."""

    def run(self, feeds: Sequence[Feed]) -> list[int]:
        """Feeds every row, in place; a token per row, or `NO_TOKEN` or `NOT_FINITE`.

        No slot is in two rows. All or none: where it raises, whatever it is, no
        state has changed, so that the rows can be run again, also one by one.
        """

    def logprobs(self) -> list[float]:
        """How likely the tokens of the last `run` were, where their draws have ``logprob``.

        A number per row: the natural logarithm of the token's probability as
        `score` defines it, so before penalties, temperature and filters; NaN where
        it was not asked for or no token was drawn.
        """

    def score(self, feed: Feed, following: int) -> list[float]:
        """Feeds one row as `run` does, but draws nothing, and says how likely its text was.

        ``feed.tokens`` are what `run` could be given: where there is a ``grid``,
        one of its sizes or a single token. Returns the natural logarithm of the
        probability of each of ``feed.tokens[1:]``, and of ``following``, which is
        not fed, after all before it: at temperature 1, without penalties, over
        the ids that exist; NaN where the model's output is not finite. Raises
        `ValueError`, before anything has changed, for a scored id that does not
        exist.
        """
