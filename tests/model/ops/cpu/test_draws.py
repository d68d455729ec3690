"""Draws at several tokens of a row: each is that of a run that ends there, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from model.native.runtime import DTYPES, NOT_FINITE, Runtime
from server.engine.types import Dry
from tests.model.ops.cpu.models import (
    SERVED,
    Shape,
    make_model,
    random_tokens,
    small_runtime,
)
from tests.model.representatives import chosen
from tests.weights import weights_of

#: Of the penalties: shorter than some texts, longer than others.
WINDOW = 9
NUM_WORDS = 10
Mask = npt.NDArray[np.uint32]
#: A row's tokens, log-probabilities, likeliest ids and logits.
Drawn = tuple[list[int], list[float], list[list[tuple[int, float]]], list[bytes]]


@dataclass(frozen=True)
class Row:
    """The last ``num_draws`` of ``num_fed`` tokens draw, after ``num_before`` others."""

    num_before: int
    num_fed: int
    num_draws: int
    draw: dict[str, Any] = field(default_factory=dict)
    masks: Sequence[Mask | None] | None = None

    def text(self, runtime: Runtime, seed: int) -> list[int]:
        """Few ids, so that penalties meet the same one again."""
        text = random_tokens(runtime.config, self.num_before + self.num_fed, seed)
        return [token % 23 for token in text]


def mask_of(num: int) -> Mask:
    """Every ``num``-th id."""
    ids = np.arange(32 * NUM_WORDS) % num == 0
    return np.packbits(ids, bitorder="little").view(np.uint32)


HARD = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 1.5}
DRY = {"dry": Dry(3.0, allowed_length=1, breakers=(4,))}
ROWS = [
    Row(0, 1, 1, {"temperature": 0.0}),
    Row(40, 5, 5, {"temperature": 0.0, "top_logprobs": 3}),
    Row(3, 70, 4, {"seed": 5, "temperature": 1.5, "top_p": 0.9, "logprob": True}),
    Row(2, 6, 6, {"temperature": 0.0, "logprob": True} | HARD),
    Row(30, 4, 4, {"temperature": 2.0, "seed": 9, "top_logprobs": 2} | HARD),
    Row(9, 3, 3, {"top_logprobs": 20}, [mask_of(2), None, mask_of(7)]),
    Row(9, 8, 2, {"temperature": 0.0, "logprob": True} | HARD, [mask_of(5), mask_of(3)]),
    Row(7, 5, 0, {"logprob": True}),
    Row(8, 3, 3, {"seed": 3, "typical_p": 0.8, "logit_bias": ((4, 3.0),)}, [None] * 3),
    Row(20, 4, 4, {"seed": 6, "xtc_probability": 0.5, "logprob": True} | DRY),
    Row(20, 4, 4, {"seed": 4, "top_n_sigma": 1.5, "logprob": True}, [mask_of(2), None] * 2),
]


def step_by_step(runtime: Runtime, row: Row, text: list[int]) -> tuple[Drawn, bytes]:
    """By runs of one token; and the state."""
    pool, draw = runtime.empty_pool(1), runtime.draw(**row.draw)
    drawn: Drawn = ([], [], [], [])
    masks = iter(row.masks or [None] * row.num_draws)
    for position, token in enumerate(text):
        if position < len(text) - row.num_draws:
            runtime.run(pool, [0], [position], [[token]], [None])
            continue
        recent = text[: position + 1][-WINDOW:]
        (found,) = runtime.run(pool, [0], [position], [[token]], [draw], [recent], [[next(masks)]])
        drawn[0].extend(found)
        drawn[1].extend(runtime.logprobs()[0])
        drawn[2].extend(runtime.top_logprobs()[0])
        drawn[3].append(runtime.logits()[0].tobytes())
    return drawn, pool.tobytes()


@pytest.mark.parametrize(("name", "kind"), chosen(SERVED, list(product(DTYPES, (1, 2)))))
def test_draws_of_a_row_are_those_of_steps(name: str, kind: tuple[str, int]) -> None:
    runtime = small_runtime(name, *kind)
    texts = [row.text(runtime, seed) for seed, row in enumerate(ROWS)]
    pool, slots = runtime.empty_pool(len(ROWS)), list(range(len(ROWS)))
    starts = [row.num_before for row in ROWS]
    for slot, start in enumerate(starts):
        if start:
            runtime.run(pool, [slot], [0], [texts[slot][:start]], [None])
    found = runtime.run(
        pool,
        slots,
        starts,
        [text[start:] for text, start in zip(texts, starts, strict=True)],
        [runtime.draw(**row.draw, penalty_window=WINDOW) for row in ROWS],
        [
            text[-WINDOW - max(0, row.num_draws - 1) :]
            for text, row in zip(texts, ROWS, strict=True)
        ],
        [row.masks for row in ROWS],
        [row.num_draws for row in ROWS],
    )
    logits = iter([row.tobytes() for row in runtime.logits()])
    logprobs, tops = runtime.logprobs(), runtime.top_logprobs()
    for slot, row in enumerate(ROWS):
        assert len(found[slot]) == row.num_draws
        given = found[slot], logprobs[slot], tops[slot], [next(logits) for _ in found[slot]]
        wanted, state = step_by_step(small_runtime(name, kind[0]), row, texts[slot])
        assert_equal(given, wanted)
        assert pool[slot].tobytes() == state
    assert next(logits, None) is None


def assert_equal(found: Drawn, wanted: Drawn) -> None:
    assert found[0] == wanted[0]
    assert np.array_equal(found[1], wanted[1], equal_nan=True)
    assert found[2:] == wanted[2:]


def test_draw_sees_only_the_tokens_up_to_its_own() -> None:
    """A penalty that excludes what was seen, for each of three draws."""
    runtime = small_runtime("elu")
    text, pool = [7, 8, 9], runtime.empty_pool(2)
    plain, hard = runtime.draw(temperature=0.0), runtime.draw(temperature=0.0, presence_penalty=2.0)
    recents = [text, text]
    runtime.run(pool, [0, 1], [0, 0], [text, text], [plain, hard], recents, None, [3, 3])
    penalty = runtime.logits()[:3] - runtime.logits()[3:]
    seen = [np.flatnonzero(row).tolist() for row in penalty]
    assert seen == [[7], [7, 8], [7, 8, 9]]


def test_token_that_is_not_finite_is_reported_in_its_place() -> None:
    """What the recurrence keeps of it spoils the draws after it."""
    model = make_model(Shape({"tie_word_embeddings": False}).config("gated"))
    weights = weights_of(model)
    weights["embedding.weight"][7] = np.nan
    runtime = Runtime(model.config, weights, "float32")
    draw = runtime.draw(temperature=0.0, top_logprobs=1)
    (found,) = runtime.run(runtime.empty_pool(1), [0], [0], [[1, 2, 7, 3]], [draw], num_draws=[3])
    assert found[0] >= 0
    assert found[1:] == [NOT_FINITE] * 2
    assert np.isnan(runtime.logprobs()[0]).tolist() == [False, True, True]
    assert list(map(len, runtime.top_logprobs()[0])) == [1, 0, 0]


@pytest.mark.parametrize(
    ("num_draws", "allowed", "recents", "message"),
    [
        ([1, 3], None, None, "a number of draws is more"),
        ([-1, 1], None, None, "a number of draws is more"),
        ([1], None, None, "different lengths"),
        ([1, "x"], None, None, "a number of draws has another type"),
        ([1, 2], [None, [None]], None, "masks are not a sequence"),
        ([1, 2], [[None, None], None], None, "masks are not a sequence"),
        ([1, 2], [None, mask_of(2)], None, "masks are not a sequence"),
        ([1, 2], [None, 3], None, "masks are not a sequence"),
        ([1, 2], [None, [None, mask_of(2)[:2]]], None, "a mask has too few words"),
        ([2, 2], None, [[1, 2], []], "fewer recent tokens"),
    ],
)
def test_bad_draws_change_nothing(num_draws: Any, allowed: Any, recents: Any, message: str) -> None:
    runtime = small_runtime("gated")
    pool, draw = runtime.empty_pool(2), runtime.draw(presence_penalty=1.0)
    call = (pool, [0, 1], [0, 0], [[1, 2], [3, 4]], [draw, draw])
    with pytest.raises(ValueError, match=message):
        runtime.run(*call, recents, allowed, num_draws)
    assert not pool.any()
    runtime.run(*call, [[1, 2], [3]], [[mask_of(2), None], None], [2, 2])
    assert pool.any()


def test_negative_window_is_refused() -> None:
    with pytest.raises(ValueError, match="penalty_window"):
        small_runtime("gated").draw(penalty_window=-1)
