"""A grammar that a session's text follows, while the session is in the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from server.engine.matcher import Matcher
from server.engine.value import Constraint
from server.errors import RequestError

Matchers = Callable[[str], Matcher]

#: What the first token under a grammar is taken to cost.
UNKNOWN_S = 0.003


class OpenConstraint:
    """The live form of a `Constraint`.

    Its matcher is made when it is first needed, from the grammar and ``tokens``,
    and may be dropped at any time: what comes next is the same.
    """

    __slots__ = ("_before_s", "_matcher", "grammar", "tokens")

    def __init__(self, grammar: str, tokens: Iterable[int] = ()) -> None:
        self.grammar, self.tokens = grammar, list(tokens)
        self._matcher: Matcher | None = None
        self._before_s = UNKNOWN_S

    @property
    def value(self) -> Constraint:
        return Constraint(self.grammar, tuple(self.tokens))

    def allowed(
        self, matchers: Matchers, budget: int, ends: Sequence[int]
    ) -> npt.NDArray[np.uint32]:
        """The mask of the tokens that may come, ``budget`` in all. Raises as the matcher does.

        ``ends`` are those that end the text without being part of it: the end-of-text
        token, and others that may come where that may.
        """
        matcher = self._made(matchers)
        self._before_s = matcher.cost_s
        mask = matcher.allowed(budget)
        eos, *others = ends
        if others and mask[eos // 32] >> (eos % 32) & 1:
            for id in others:
                mask[id // 32] |= np.uint32(1 << id % 32)
        return mask

    def accept(self, token: int, ends: Sequence[int], matchers: Matchers) -> bool:
        """Continues by ``token``; says whether the text is complete. Raises as `allowed` does."""
        if token in ends:
            return True
        matcher = self._made(matchers)
        matcher.accept(token)
        self.tokens.append(token)
        return matcher.is_over()

    @property
    def cost_s(self) -> float:
        """Seconds that the next token may take, by the last one."""
        return UNKNOWN_S if self._matcher is None else self._matcher.cost_s

    @property
    def draft_cost_s(self) -> float:
        """Seconds that each token after the next one may take: one that was slow says nothing."""
        return min(self._before_s, self.cost_s)

    def rest(self) -> None:
        """Lets the matcher go, which takes memory."""
        self._matcher = None

    def copy(self) -> OpenConstraint:
        """Another one at this place."""
        other = OpenConstraint(self.grammar, self.tokens)
        if self._matcher is not None:
            other._matcher = self._matcher.copy()
        return other

    def _made(self, matchers: Matchers) -> Matcher:
        if self._matcher is None:
            matcher = matchers(self.grammar)
            for token in self.tokens:
                matcher.accept(token)
            self._matcher = matcher
        return self._matcher


def no_matchers(grammar: str) -> Matcher:
    """Stands for `Matchers` where there are none: a session can come from elsewhere."""
    raise RequestError("this server cannot follow a grammar")
