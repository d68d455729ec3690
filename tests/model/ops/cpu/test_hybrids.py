"""Models with attention on the native runtime equal torch, with each bound of the past."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.architectures.network import ModelState, model_of
from model.native.runtime import DTYPES, Runtime, levels
from tests.model.ops.cpu.hybrids import CONFIGS, Weights, config_of, random_weights
from tests.model.ops.cpu.models import (
    FUSED,
    ROUNDING_LEVELS,
    Pool,
    feed,
    random_tokens,
    relative_error,
    state_error,
    states,
)
from tests.model.ops.cpu.test_precisions import OTHER_STEP_TOLERANCE, ROUNDING
from tests.model.ops.cpu.test_same_bits import Result, together

#: Of float32 logits and states, relative to the largest. Torch computes in float32 as well, and
#: the norms of short vectors make more of the differences.
TOLERANCE = 1e-4
#: Of models with keys and values in float16, where a number in the middle of two steps may take
#: another one: a step, relative to the largest.
STEP = 2.0**-10
#: A text that ends at the bound of four tiles and a part; a ring that turns more than twice, within
#: a tile and beyond one.
PASTS = [("stop", 272, 272), ("slide", 32, 100), ("slide", 144, 400)]
WINDOWED = ("lfm3", "lfm3-square", "lfm3-windows", "llama-windows", "llama-windows-square")
BOUNDED = [name for name, config in CONFIGS.items() if not config.constant_state]


@cache
def runtime_of(
    name: str,
    context: int = 272,
    past: str = "stop",
    dtype: str = "float32",
    threads: int = 1,
    level: str | None = None,
) -> Runtime:
    return Runtime(config_of(name, context, past), random_weights(name), dtype, threads, level)


def by_torch(
    name: str, context: int, past: str, tokens: list[int], weights: Weights | None = None
) -> tuple[Tensor, ModelState]:
    model = model_of(config_of(name, context, past), weights or random_weights(name))
    ids, position = torch.tensor([tokens]), torch.zeros(1, dtype=torch.int64)
    logits, state = model.chunk(ids, model.empty_state(1), position)
    return logits[0], state


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize(("past", "context", "length"), PASTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_equal_torch(name: str, past: str, context: int, length: int, level: str) -> None:
    runtime = runtime_of(name, context, past, level=level)
    tokens, pool = random_tokens(runtime.config, length), runtime.empty_pool(1)
    wanted, wanted_state = by_torch(name, context, past, tokens)
    tolerance = TOLERANCE if name == "qwen35-linear" else STEP
    assert relative_error(torch.from_numpy(feed(runtime, pool, 0, tokens)), wanted) <= tolerance
    assert state_error(states(runtime.config, pool[0]), wanted_state) <= tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("past", "context", "length"), PASTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_batch_cuts_and_threads_do_not_change_bits(
    name: str, past: str, context: int, length: int, dtype: str
) -> None:
    """Cuts of up to twice the tile of places, over the bound and across turns of the ring.

    And long ones, which threads share in segments.
    """
    single = runtime_of(name, context, past, dtype)
    texts = [random_tokens(single.config, length - 7 * i, seed=i) for i in range(3)]
    wanted = []
    for text in texts:
        pool = single.empty_pool(1)
        logits = feed(single, pool, 0, text)[-1]
        wanted.append(Result(logits.tobytes(), pool[0].tobytes()))
    for threads, longest in ((1, 130), (3, 20), (2, 400)):
        runtime = runtime_of(name, context, past, dtype, threads)
        assert together(runtime, texts, random.Random(threads), longest) == wanted


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", WINDOWED)
def test_long_text_in_segments_is_that_of_single_tokens(name: str, level: str) -> None:
    """In one call with texts that turn without segments, are beyond the window, and begin."""
    single, begun = runtime_of(name, 800, level=level), (150, 150, 150, 0)
    lengths = zip(begun, (600, 40, 1, 5), strict=True)
    texts = [random_tokens(single.config, sum(each), seed=sum(each)) for each in lengths]
    wanted = []
    for text in texts:
        pool = single.empty_pool(1)
        logits = feed(single, pool, 0, text)[-1]
        wanted.append(Result(logits.tobytes(), pool[0].tobytes()))
    for threads in (2, 3):
        runtime = runtime_of(name, 800, threads=threads, level=level)
        pool, draws = runtime.empty_pool(4), [runtime.draw(temperature=0.0)] * 4
        for slot, num in enumerate(begun[:3]):
            runtime.run(pool, [slot], [0], [texts[slot][:num]], [None])
        rest = [text[num:] for text, num in zip(texts, begun, strict=True)]
        runtime.run(pool, [0, 1, 2, 3], list(begun), rest, draws)
        found = zip(runtime.logits(), pool, strict=True)
        assert [Result(row.tobytes(), state.tobytes()) for row, state in found] == wanted


@pytest.mark.parametrize("level", [level for level in levels() if level != "v2"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_levels_with_a_fused_multiply_add_agree(name: str, dtype: str, level: str) -> None:
    found, wanted = (runtime_of(name, 144, "slide", dtype, 1, each) for each in (level, FUSED))
    tokens = [random_tokens(found.config, 300)]
    chance = random.Random(0)
    assert together(found, tokens, chance, 90) == together(wanted, tokens, random.Random(0), 90)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rounded_weights_equal_torch_with_these(name: str, dtype: str, level: str) -> None:
    """And with inputs of products rounded, where the runtime rounds them."""
    runtime = runtime_of(name, 32, "slide", dtype, level=level)
    tokens, pool = random_tokens(runtime.config, 60), runtime.empty_pool(1)
    found = torch.from_numpy(feed(runtime, pool, 0, tokens))
    rounds_inputs = dtype == "int8" or level in ROUNDING_LEVELS
    rounding = ROUNDING[dtype]
    weights = {
        key: rounding(weight) if is_rounded(key) else weight
        for key, weight in random_weights(name).items()
    }
    with RoundedInputs(rounding) if rounds_inputs else nullcontext():
        wanted, wanted_state = by_torch(name, 32, "slide", tokens, weights)
    # An input takes another step more often where a key or value did before.
    tolerance = 2 * OTHER_STEP_TOLERANCE if rounds_inputs else STEP
    assert relative_error(found, wanted) <= tolerance
    assert state_error(states(runtime.config, pool[0]), wanted_state) <= tolerance
    errors = [relative_error(*each) for each in zip(found, wanted, strict=True)]
    assert min(errors) <= TOLERANCE  # most inputs lie clear of the middle of two steps


def is_rounded(key: str) -> bool:
    """Matrices, but for those of the decay and the rate, which are kept as they are."""
    others = ("norm.weight", "mixer.a.weight", "mixer.b.weight")
    return key.endswith(".weight") and not key.endswith(others)


class RoundedInputs(TorchFunctionMode):
    """Rounds the inputs of all linear maps but those to a number for each head."""

    def __init__(self, rounding: Callable[[Any], Any]) -> None:
        super().__init__()
        self.rounding = rounding

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ == "linear" and args[1].shape[0] > 4:
            args = (torch.from_numpy(self.rounding(args[0].numpy())), *args[1:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", BOUNDED)
def test_feed_beyond_the_bound_changes_nothing(name: str) -> None:
    runtime = runtime_of(name, 32)
    pool, tokens = runtime.empty_pool(2), random_tokens(runtime.config, 33)
    runtime.run(pool, [0], [0], [tokens[:30]], [None])
    before = pool.copy()
    message = "a text of 33 tokens is beyond the context of 32"
    with pytest.raises(ValueError, match=message):
        runtime.run(pool, [1, 0], [0, 30], [tokens[:2], tokens[30:]], [None, None])
    with pytest.raises(ValueError, match=message):
        runtime.score(pool, 1, 0, tokens, 3)
    with pytest.raises(ValueError, match=message):
        runtime.embed(pool, 0, 30, tokens[30:])
    assert (pool == before).all()
    runtime.run(pool, [1, 0], [0, 30], [tokens[:32], tokens[30:32]], [None, None])
    assert pool[0].tobytes() == pool[1].tobytes()


@pytest.mark.parametrize("position", [1, 15, 16, 70])
@pytest.mark.parametrize("name", BOUNDED)
def test_places_beyond_the_text_are_not_read(name: str, position: int) -> None:
    runtime = runtime_of(name, 144)
    pool, tokens = runtime.empty_pool(2), random_tokens(runtime.config, position + 20)
    draw = runtime.draw(temperature=0.0)
    runtime.run(pool, [0], [0], [tokens[:position]], [None])
    pool[1] = pool[0]
    fill_beyond(runtime, pool[1:], position)
    for slot in (0, 1):
        for cut in (position + 1, position + 20):
            begin = position if cut == position + 1 else position + 1
            runtime.run(pool, [slot], [begin], [tokens[begin:cut]], [draw])
    empty = runtime.empty_pool(1)
    empty[0] = pool[0]
    fill_beyond(runtime, empty, position + 20)
    assert empty[0].tobytes() == pool[1].tobytes()


def fill_beyond(runtime: Runtime, pool: Pool, position: int) -> None:
    """Puts NaN into every place that a text of this length has not reached."""
    rings = getattr(runtime.config, "window_layers", ())
    for index, layer in enumerate(runtime.layout.views(pool)):
        held = min(position, runtime.config.window) if index in rings else position
        for name, axis in (("k", 4), ("v", 3)):
            if name in layer:
                places = np.moveaxis(layer[name], axis, 2)  # [1, blocks, positions, ...]
                place = np.arange(16 * places.shape[1]).reshape(-1, 16)
                places[0, place >= held] = np.nan


@pytest.mark.parametrize("position", [1_000_000, 2**31 + 5])
@pytest.mark.parametrize("name", BOUNDED)
def test_late_positions_equal_torch(name: str, position: int) -> None:
    """A text that has turned the ring often; torch continues with the state."""
    runtime = runtime_of(name, 32, "slide")
    tokens, pool = random_tokens(runtime.config, 80), runtime.empty_pool(1)
    runtime.run(pool, [0], [position], [tokens[:40]], [None])
    model = model_of(runtime.config, random_weights(name))
    before = states(runtime.config, pool[0])
    wanted, after = model.chunk(torch.tensor([tokens[40:]]), before, torch.tensor([position + 40]))
    found = torch.from_numpy(feed(runtime, pool, 0, tokens[40:], position + 40))
    assert relative_error(found, wanted[0]) <= STEP
    assert state_error(states(runtime.config, pool[0]), after) <= STEP
