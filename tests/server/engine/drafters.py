"""Drafters that are right, wrong, both or silent, so that any number of drafts is accepted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from model.foreign import MultiTokenHead
from model.native.runtime import Runtime
from model.state import StateLayout
from server.engine.drafts import MAX_STREAMS, DraftCosts, Proposal, SuffixDrafter
from server.engine.engine import Engine
from server.engine.model_drafter import HeadDrafter, ModelDrafter
from server.engine.request import Live
from server.engine.runner import CpuStatePool, Mask, NativeRunner
from server.engine.session import Matchers, Session
from server.engine.types import Request
from tests.fakes import Hashed
from tests.tiny import tiny_checkpoint, tiny_head, tiny_runtime, tiny_tokenizer

MAX_DRAFTS = 5
#: How many of the drafts are right, one kind after the other; "random" ones may be.
KINDS: tuple[int | str, ...] = (MAX_DRAFTS, 0, 2, "random", 1, MAX_DRAFTS, "none", 3)


class Drafter:
    """See `server.engine.drafts.Drafter`. Subclasses know what is right."""

    max_drafts = MAX_DRAFTS
    max_streams = 100

    def __init__(self, vocab_size: int, kinds: Sequence[int | str] = KINDS) -> None:
        self.vocab_size = vocab_size
        self.num_proposed = 0
        self._kinds = itertools.cycle(kinds)

    def next_draft(self, live: Live, taken: Sequence[int], mask: Mask) -> int | None:
        number = len(taken)
        if number == len(live.drafts):
            return None
        draft = live.drafts[number]
        return draft if mask[draft // 32] >> (draft % 32) & 1 else None

    def propose(self, live: Live, limit: int, num_running: int) -> Proposal:
        request, session = live.request, live.session
        assert 0 < limit <= MAX_DRAFTS, limit
        kind = next(self._kinds)
        right = [] if kind == "none" else self.right(request, session, limit)
        if kind == "random":
            right = [(7 * session.length + 31 * i) % self.vocab_size for i in range(limit)]
        elif isinstance(kind, int):
            right[kind:] = [(token + 1) % self.vocab_size for token in right[kind:]]
        self.num_proposed += len(right)
        return Proposal(right, len(right))

    def right(self, request: Request, session: Session, limit: int) -> list[int]:
        """What will be drawn, as far as it is known."""
        raise NotImplementedError


class ScriptedDrafter(Drafter):
    """Knows the texts that the requests will have: by id, from the session's first token on."""

    def __init__(
        self, vocab_size: int, texts: dict[str, Sequence[int]], kinds: Sequence[int | str] = KINDS
    ) -> None:
        super().__init__(vocab_size, kinds)
        self.texts = texts

    def right(self, request: Request, session: Session, limit: int) -> list[int]:
        text = self.texts[request.request_id]
        return list(text[session.length : session.length + limit])


class HashedDrafter(Drafter):
    """Knows what `FakeRuntime` draws: the next token is a hash of all before it."""

    engine: Engine

    def __init__(self, vocab_size: int, matchers: Matchers) -> None:
        super().__init__(vocab_size)
        self._matchers = matchers

    def right(self, request: Request, session: Session, limit: int) -> list[int]:
        assert request.sampling is not None and session.slot is not None
        state = np.frombuffer(self.engine._pool.read(session.slot, session.position).data, np.int64)
        hashed = Hashed(*state[:2].tolist()).after(session.next(session.num_unfed + 1))
        place = None if session.constraint is None else session.constraint.copy()
        tokens: list[int] = []
        for _ in range(limit):
            try:
                mask = None if place is None else place.allowed(self._matchers, 9, [0])
                tokens.append(hashed.token(request.sampling, self.vocab_size, mask))
                if place is not None and place.accept(tokens[-1], [0], self._matchers):
                    break
            except RuntimeError:  # a matcher that fails there
                break
            hashed = hashed.after(tokens[-1:])
        return tokens


#: Rows and drafts cost next to nothing: whatever may be right is drafted.
CHEAP = DraftCosts((1.0, 1.0, 1.0, 1.0, 1.0))
#: Of a text's past nothing is drafted.
NEVER = DraftCosts((1.0, 2.0, 4.0, 8.0, 16.0))


def model_drafter(
    attention: str,
    costs: DraftCosts = CHEAP,
    past: DraftCosts = NEVER,
    num_slots: int = MAX_STREAMS,
) -> ModelDrafter:
    """The tiny model of ``attention`` drafts, where the text's past does not."""
    pool = CpuStatePool(StateLayout.of(tiny_checkpoint(attention).config), num_slots)
    runner = NativeRunner(tiny_runtime(attention), pool)
    return ModelDrafter(SuffixDrafter(past, tiny_tokenizer().token_bytes), runner, pool, costs)


def head_drafter(
    attention: str = "qwen35",
    costs: DraftCosts = CHEAP,
    past: DraftCosts = NEVER,
    num_slots: int = MAX_STREAMS,
    head: MultiTokenHead | None = None,
) -> HeadDrafter:
    """A multi-token head of the tiny model of ``attention`` drafts, where the past does not."""
    found, model = head or tiny_head(attention), tiny_runtime(attention)
    runtime = Runtime(found.config, found.weights, "float32", num_ids=model.num_ids, base=model)
    pool = CpuStatePool(runtime.layout, num_slots)
    return HeadDrafter(SuffixDrafter(past, tiny_tokenizer().token_bytes), runtime, pool, costs)
