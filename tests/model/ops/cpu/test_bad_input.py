"""What cannot be run is refused with its reason, before any state has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from model.config import ModelConfig
from model.native.runtime import NativeError, Runtime
from tests.model.ops.cpu.models import (
    SERVED,
    random_tokens,
    small_model,
    small_runtime,
    small_weights,
)

Weights = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Call:
    """The arguments of a run of two rows that is sound until a test changes it."""

    slots: Any = (0, 2)
    positions: Any = (4, 0)
    tokens: Any = ((1, 2), (3,))
    draws: Any = (None, None)
    recents: Any = None

    def lists(self) -> list[Any]:
        fields = (self.slots, self.positions, self.tokens, self.draws, self.recents)
        return [list(f) if isinstance(f, tuple) else f for f in fields]


SOUND = Call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (replace(SOUND, slots=(0, 3)), "a slot is out of range"),
        (replace(SOUND, slots=(0, -1)), "a slot"),
        (replace(SOUND, slots=(2, 2)), "a slot is given twice"),
        (replace(SOUND, slots=(0, "x")), "a slot has another type"),
        (replace(SOUND, slots=(0,)), "different lengths"),
        (replace(SOUND, positions=(4, -1)), "a position is negative"),
        (replace(SOUND, positions=(4, 2**63)), "a position"),
        (replace(SOUND, positions=(4, 0.5)), "a position has another type"),
        (replace(SOUND, positions=(4, 0, 0)), "different lengths"),
        (replace(SOUND, tokens=((1, 2), (257,))), "a token id is out of range"),
        (replace(SOUND, tokens=((1, 2), (-1,))), "a token id is out of range"),
        (replace(SOUND, tokens=((1, 2), (2**40,))), "a token id is out of range"),
        (replace(SOUND, tokens=((1, 2), (2**70,))), "a token id"),
        (replace(SOUND, tokens=((1, 2), "ab")), "a token id has another type"),
        (replace(SOUND, tokens=((1, 2), ())), "a sequence has no token"),
        (replace(SOUND, tokens=((1, 2),)), "different lengths"),
        (replace(SOUND, draws=(None, 1)), "a draw has another type"),
        (replace(SOUND, draws=(None,)), "different lengths"),
    ],
)
def test_bad_call_changes_nothing(call: Call, message: str) -> None:
    runtime = small_runtime("gated")
    pool = pool_in_use(runtime)
    before = pool.tobytes()
    with pytest.raises(ValueError, match=message):
        runtime.run(pool, *call.lists())
    assert pool.tobytes() == before
    runtime.run(pool, *SOUND.lists())
    assert pool.tobytes() != before


@pytest.mark.parametrize("recents", [[None, [257]], [None, [-1]], [[1]], [None, ["x"]]])
def test_bad_recent_tokens_change_nothing(recents: list[Any]) -> None:
    runtime = small_runtime("gated")
    draws, pool = [None, runtime.draw(presence_penalty=1.0)], runtime.empty_pool(2)
    with pytest.raises(ValueError, match=r"a token id|different lengths"):
        runtime.run(pool, [0, 1], [0, 0], [[1], [2]], draws, recents)
    assert not pool.any()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros(9, np.uint32), "a mask allows no token"),
        (np.array([0] * 6 + [0xFFFFFF00] * 3, np.uint32), "a mask allows no token"),
        (np.full(6, -1, np.int64).astype(np.uint32), "a mask has too few words"),
        (np.zeros(0, np.uint32), "a mask has too few words"),
        (np.ones(9, np.int64), "a mask is not"),
        (np.ones(9, np.int32), "a mask is not"),
        (np.ones((1, 9), np.uint32), "a mask is not"),
        (np.ones(18, np.uint32)[::2], "a mask is not"),
        ([1] * 9, "a mask is not"),
        (7, "a mask is not"),
    ],
)
def test_bad_mask_changes_nothing(mask: Any, message: str) -> None:
    """Over 200 ids: six words and eight bits."""
    runtime = Runtime(*small_weights("gated"), num_ids=200)
    draw, pool, sound = runtime.draw(), runtime.empty_pool(2), np.ones(7, np.uint32)
    call = (pool, [0, 1], [0, 0], [[1], [2]], [draw, draw], None)
    with pytest.raises(ValueError, match=message):
        runtime.run(*call, [[sound], [mask]])
    with pytest.raises(ValueError, match="different lengths"):
        runtime.run(*call, [[sound]])
    assert not pool.any()
    sound.flags.writeable = False
    runtime.run(*call, [[sound], None])
    assert pool.any()


def test_mask_of_a_row_that_draws_nothing_is_not_read() -> None:
    runtime = small_runtime("gated")
    pool = runtime.empty_pool(1)
    assert runtime.run(pool, [0], [0], [[1]], [None], None, [[np.zeros(9, np.uint32)]]) == [[]]


@pytest.mark.parametrize(
    "draw",
    [
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((3, float("nan")),)},
        {"logit_bias": ((3, 1.0), (4, float("inf")))},
        {"top_logprobs": 21},
        {"top_logprobs": -1},
    ],
)
def test_bad_draw_is_refused(draw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"logit_bias|likeliest"):
        small_runtime("gated").draw(**draw)


def wider(pool: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.pad(pool, [(0, 0), (0, 64)])


def frozen(pool: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    pool.flags.writeable = False
    return pool


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (wider, ValueError),
        (lambda pool: pool[:, :64].copy(), ValueError),
        (lambda pool: pool[0], TypeError),
        (lambda pool: pool[::2], TypeError),
        (lambda pool: pool.astype(np.float32), TypeError),
        (lambda pool: pool.tolist(), TypeError),
        (frozen, TypeError),
    ],
)
def test_pool_of_another_form_is_refused(
    change: Callable[[npt.NDArray[np.uint8]], Any], error: type[Exception]
) -> None:
    """A copy would be filled in its stead, and the states would be lost."""
    runtime, pool = small_runtime("gated"), small_runtime("gated").empty_pool(4)
    changed = change(pool)
    with pytest.raises(error):
        runtime.run(changed, [0], [0], [[1]], [None])
    with pytest.raises(error):
        runtime.score(changed, 0, 0, [1, 2])
    with pytest.raises(error):
        runtime.embed(changed, 0, 0, [1, 2])
    assert not pool.any()


@pytest.mark.parametrize(
    ("slot", "position", "tokens", "following"),
    [
        (3, 0, [1, 2], 3),
        (0, -1, [1, 2], 3),
        (0, 0, [1], None),
        (0, 0, [], None),
        (0, 0, [], 3),
        (0, 0, [1, 257], 3),
        (0, 0, [-1, 1], 3),
        (0, 0, [1, 2**70], 3),
        (0, 0, [1, "x"], 3),
        (0, 0, [1], 257),
        (0, 0, [1, 2], -1),
        (0, 0, [1, 2], 2**70),
        (0, 0, [1, 2], 0.5),
        (0, 0, [1, 200], 3),
        (0, 0, [1], 200),
    ],
)
def test_bad_score_changes_nothing(slot: int, position: int, tokens: Any, following: Any) -> None:
    runtime = Runtime(*small_weights("gated"), num_ids=200)
    pool = pool_in_use(runtime)
    before = pool.tobytes()
    with pytest.raises(ValueError, match=r"no such slot|token id"):
        runtime.score(pool, slot, position, tokens, following)
    assert pool.tobytes() == before
    runtime.score(pool, 0, 4, [200, 199], 0)
    assert pool.tobytes() != before


@pytest.mark.parametrize("num_top", [-1, 21, 2**31 - 1])
def test_score_of_too_many_likely_tokens_changes_nothing(num_top: int) -> None:
    runtime = small_runtime("gated")
    pool = runtime.empty_pool(1)
    with pytest.raises(ValueError, match="likeliest"):
        runtime.score_top(pool, 0, 0, [1, 2], 3, num_top)
    assert not pool.any()


@pytest.mark.parametrize(
    ("slot", "position", "tokens"),
    [(3, 0, [1]), (0, -1, [1]), (0, 0, []), (0, 0, [257]), (0, 0, [-1]), (0, 0, ["x"])],
)
def test_bad_embedding_changes_nothing(slot: int, position: int, tokens: Any) -> None:
    runtime = small_runtime("gated")
    pool = pool_in_use(runtime)
    before = pool.tobytes()
    with pytest.raises(ValueError, match=r"no such slot|token id"):
        runtime.embed(pool, slot, position, tokens)
    assert pool.tobytes() == before
    runtime.embed(pool, 0, 4, [256, 0])
    assert pool.tobytes() != before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"level": "v9"}, r"level must be one of .*, not 'v9'"),
        ({"dtype": "int2"}, r"dtype must be one of float32, bfloat16, int8, int4, not 'int2'"),
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"num_ids": 0}, "num_ids must be in 1..257, not 0"),
        ({"num_ids": 258}, "num_ids must be in 1..257, not 258"),
    ],
)
def test_bad_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(NativeError, match=message):
        Runtime(*small_weights("elu"), **settings)


def test_growing_cache_is_refused() -> None:
    with pytest.raises(NativeError, match="attention 'softmax' has no constant state"):
        Runtime(ModelConfig(vocab_size=257, attention="softmax"), {})


@pytest.mark.parametrize("name", SERVED)
def test_missing_or_misshapen_weight_is_named(name: str) -> None:
    config, weights = small_model(name)
    for key in weights.keys() - unread(name):
        missing = {k: v for k, v in weights.items() if k != key}
        with pytest.raises(NativeError, match=f"weight '{key}' is missing"):
            Runtime(config, missing, "float32")
        for wrong in (weights[key][:-1], weights[key][None], np.float32(1.0)):
            with pytest.raises(ValueError, match=f"weight '{key}' has another shape"):
                Runtime(config, {**weights, key: np.asarray(wrong)}, "float32")


def unread(name: str) -> set[str]:
    """Weights that only training looks at."""
    layers = range(2) if name == "vq" else ()
    return {f"blocks.{i}.attention.ema_count" for i in layers}


def pool_in_use(runtime: Runtime) -> npt.NDArray[np.uint8]:
    pool = runtime.empty_pool(3)
    runtime.run(pool, [0], [0], [random_tokens(runtime.config, 4)], [None])
    return pool
