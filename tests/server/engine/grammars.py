"""A grammar that hangs on every token before: what may come is a hash of them all.

Its text is ``length``, or ``length/fault``. A text may end wherever the hash says
so, and ends after ``length`` tokens. The ``fault`` is the method that fails there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from server.engine.engine import Engine
from server.engine.session import Constraint
from server.engine.types import Request
from server.errors import RequestError
from tests.tiny import request, tiny_tokenizer

VOCAB_SIZE, EOS = tiny_tokenizer().vocab_size, 0
PROMPT = (10, 20, 30)
#: After that prompt, with this seed, a text under this grammar continues to its full length.
LENGTH, GRAMMAR, SEED = 30, "30", 4
#: Of so many tokens one may come; of so many places one is where the text may end.
STRIDE, PERIOD = 5, 11
TIGHT = "tight"


class FakeMatcher:
    """See `server.engine.session.Matcher`."""

    def __init__(self, grammar: str, vocab_size: int, eos: int, cost_s: float = 0.0) -> None:
        self.cost_s = cost_s
        length, _, self._fault = grammar.partition("/")
        self._length, self._vocab_size, self._eos = int(length), vocab_size, eos
        self._hash = self._count = 0
        self._fail("start")

    def ids(self) -> list[int]:
        """The tokens that may come."""
        ids = range(self._hash % STRIDE, self._vocab_size, STRIDE)
        found = [] if self.is_over() else [id for id in ids if id != self._eos]
        may_end = self.is_over() or self._hash % PERIOD == PERIOD - 1
        return [*found, self._eos] if may_end else found

    def allowed(self, budget: int) -> npt.NDArray[np.uint32]:
        """Those of `ids`; at the last token of a ``tight`` grammar the first of them alone."""
        self._fail("allowed")
        mask = np.zeros(-(-self._vocab_size // 32), np.uint32)
        ids = self.ids()[:1] if self._fault == TIGHT and budget == 1 else self.ids()
        for id in ids:
            mask[id // 32] |= np.uint32(1 << id % 32)
        return mask

    def accept(self, token: int) -> None:
        self._fail("accept")
        if token not in self.ids() or token == self._eos:
            raise RequestError(f"{token} may not come here")
        self._hash = (self._hash * 31 + token + 1) % (1 << 30)
        self._count += 1

    def is_over(self) -> bool:
        return self._count == self._length

    def copy(self) -> Self:
        other = type(self)(f"{self._length}", self._vocab_size, self._eos, self.cost_s)
        other._hash, other._count, other._fault = self._hash, self._count, self._fault
        return other

    def _fail(self, method: str) -> None:
        if self._fault == method and (self._count == self._length // 2 or method == "start"):
            raise RuntimeError(f"the matcher fails in {method}")


class FakeMatchers:
    """Makes them for an engine. ``num_made`` counts them."""

    def __init__(self, vocab_size: int, eos: int, cost_s: float = 0.0) -> None:
        self._vocab_size, self._eos, self._cost_s, self.num_made = vocab_size, eos, cost_s, 0

    def __call__(self, grammar: str) -> FakeMatcher:
        self.num_made += 1
        return FakeMatcher(grammar, self._vocab_size, self._eos, self._cost_s)


def constrained(
    tokens: Sequence[int] = PROMPT, session: str | None = None, **options: object
) -> Request:
    options = {"max_tokens": 60, "seed": SEED, "grammar": GRAMMAR, **options}
    return request("r", tokens, session, **options)  # type: ignore[arg-type]


def follow(tokens: Sequence[int], grammar: str = GRAMMAR) -> FakeMatcher:
    """A matcher that has accepted ``tokens``, without an end-of-text token."""
    matcher = FakeMatcher(grammar, VOCAB_SIZE, EOS)
    for token in tokens:
        matcher.accept(token)
    return matcher


def constraint(engine: Engine, session: str) -> Constraint | None:
    return engine.kept.value(session, "me").constraint
