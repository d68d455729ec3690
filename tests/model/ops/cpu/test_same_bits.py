"""The same bits whatever the batch, the slot, the number of threads and the cut of a prompt.

Logits and state blocks are compared byte by byte with those of a sequence fed
alone, in one call, by one thread. Slots without a session hold ones in every
bit, NaN as a number, and keep them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.native.runtime import DTYPES, Runtime, levels
from tests.model.ops.cpu.models import (
    FUSED,
    ROUNDING_LEVELS,
    SERVED,
    Shape,
    make_model,
    random_tokens,
    small_model,
    small_runtime,
)
from tests.model.representatives import chosen
from tests.weights import weights_of

#: Every dtype where products differ; attention is float32 in all of them.
CASES = [(name, "float32") for name in SERVED] + [
    (name, dtype)
    for name in ("delta", "elu", "gated", "rwkv7", "qwen35", "lfm2", "lfm3", "mamba2", "falcon")
    for dtype in ("bfloat16", "int8", "int4")
]
#: Of numbers and of threads.
KINDS = [("float32", 3), ("float32", 1), ("bfloat16", 2), ("int8", 4), ("int4", 3)]
#: Families and mechanisms that take a batch of many sequences in two halves.
HALVED = ("mamba2", "mamba2_grouped", "gated", "delta", "retnet", "dijiang", "rwkv7", "arwkv7")
POISON = 0xFF
LENGTHS = (1, 3, 70, 64, 17, 6, 33)


@dataclass(frozen=True)
class Result:
    """What a sequence leaves: the logits after its last token, and its state."""

    logits: bytes
    state: bytes


def alone(name: str, dtype: str, tokens: list[int], level: str | None = None) -> Result:
    runtime = small_runtime(name, dtype, level=level)
    pool = runtime.empty_pool(1)
    runtime.run(pool, [0], [0], [tokens], [runtime.draw(temperature=0.0)])
    return Result(runtime.logits()[0].tobytes(), pool[0].tobytes())


def sequences(name: str, lengths: tuple[int, ...]) -> list[list[int]]:
    config, _ = small_model(name)
    return [random_tokens(config, length, seed) for seed, length in enumerate(lengths)]


def together(
    runtime: Runtime, texts: list[list[int]], chance: random.Random, longest: int
) -> list[Result]:
    """Fed in random groups, orders, slots and pieces of up to ``longest`` tokens."""
    num_slots = len(texts) + 5
    pool = np.full((num_slots, runtime.layout.num_bytes), POISON, np.uint8)
    slots = chance.sample(range(num_slots), len(texts))
    pool[slots] = 0
    done, results = [0] * len(texts), [Result(b"", b"")] * len(texts)
    draw = runtime.draw(temperature=0.0)
    while any(done[i] < len(text) for i, text in enumerate(texts)):
        waiting = [i for i, text in enumerate(texts) if done[i] < len(text)]
        group = chance.sample(waiting, chance.randint(1, len(waiting)))
        sizes = [chance.randint(1, longest) for _ in group]
        parts = [texts[i][done[i] : done[i] + n] for i, n in zip(group, sizes, strict=True)]
        last = [done[i] + len(part) == len(texts[i]) for i, part in zip(group, parts, strict=True)]
        runtime.run(
            pool,
            [slots[i] for i in group],
            [done[i] for i in group],
            parts,
            [draw if ends else None for ends in last],
        )
        ended = [i for i, ends in zip(group, last, strict=True) if ends]
        for i, logits in zip(ended, runtime.logits(), strict=True):
            results[i] = Result(logits.tobytes(), b"")
        for i, part in zip(group, parts, strict=True):
            done[i] += len(part)
    assert_poisoned(pool, slots)
    return [
        Result(result.logits, pool[slot].tobytes())
        for result, slot in zip(results, slots, strict=True)
    ]


def assert_poisoned(pool: npt.NDArray[np.uint8], used: list[int]) -> None:
    free = np.setdiff1d(np.arange(len(pool)), used)
    assert (pool[free] == POISON).all()


@pytest.mark.parametrize(("name", "kind"), chosen(SERVED, KINDS))
def test_batch_chunks_slots_and_threads_do_not_change_bits(
    name: str, kind: tuple[str, int]
) -> None:
    dtype, threads = kind
    texts = sequences(name, LENGTHS)
    found = together(small_runtime(name, dtype, threads), texts, random.Random(threads), 40)
    assert found == [alone(name, dtype, text) for text in texts]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_token_by_token_is_the_same(name: str, dtype: str) -> None:
    texts = sequences(name, (64,))
    found = together(small_runtime(name, dtype), texts, random.Random(0), 1)
    assert found == [alone(name, dtype, text) for text in texts]


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("decay", [True, False])
def test_prompt_of_wide_heads_is_that_of_single_tokens(decay: bool, level: str) -> None:
    """Heads of 72: some vectors at a time, single vectors and single numbers at every level."""
    shape = Shape({"hidden_size": 48, "head_dim": 72}, {"decay": decay})
    config = shape.config("delta")
    runtime = Runtime(config, weights_of(make_model(config)), "float32", 1, level)
    tokens, results = random_tokens(config, 19), []
    for size in (19, 1, 4):
        pool, draw = runtime.empty_pool(1), runtime.draw(temperature=0.0)
        for begin in range(0, len(tokens), size):
            runtime.run(pool, [0], [begin], [tokens[begin : begin + size]], [draw])
        results.append(Result(runtime.logits()[0].tobytes(), pool[0].tobytes()))
    assert results[1:] == results[:1] * 2


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 13, 64, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_rows_is_the_same(dtype: str, rows: int, threads: int) -> None:
    runtime = small_runtime("gated", dtype, threads)
    texts = sequences("gated", (1,) * rows)
    pool, draw = runtime.empty_pool(rows), runtime.draw(temperature=0.0)
    runtime.run(pool, list(range(rows)), [0] * rows, texts, [draw] * rows)
    for slot, logits in enumerate(runtime.logits()):
        wanted = alone("gated", dtype, texts[slot])
        assert Result(logits.tobytes(), pool[slot].tobytes()) == wanted


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HALVED)
def test_step_in_two_halves_is_the_same(name: str, dtype: str, level: str) -> None:
    """Of an odd number of sequences, some with two tokens, by three threads."""
    runtime = small_runtime(name, dtype, 3, level)
    texts = sequences(name, (2, 3, 3, 2, 3))
    slots = list(range(61))
    pool, draws = runtime.empty_pool(len(slots)), [runtime.draw(temperature=0.0)] * len(slots)
    chosen_texts = [texts[slot % len(texts)] for slot in slots]
    runtime.run(pool, slots, [0] * len(slots), [text[:-1] for text in chosen_texts], draws)
    positions = [len(text) - 1 for text in chosen_texts]
    runtime.run(pool, slots, positions, [text[-1:] for text in chosen_texts], draws)
    wanted = [alone(name, dtype, text, level) for text in texts]
    for slot, logits in enumerate(runtime.logits()):
        assert Result(logits.tobytes(), pool[slot].tobytes()) == wanted[slot % len(texts)]


@given(
    name=st.sampled_from(SERVED),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=9),
    longest=st.integers(1, 90),
    chance=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_any_schedule_is_the_same(
    name: str, dtype: str, threads: int, lengths: list[int], longest: int, chance: random.Random
) -> None:
    texts = sequences(name, tuple(lengths))
    found = together(small_runtime(name, dtype, threads), texts, chance, longest)
    assert found == [alone(name, dtype, text) for text in texts]


def test_sampled_tokens_do_not_depend_on_the_batch() -> None:
    runtime, texts = small_runtime("elu"), sequences("elu", LENGTHS)
    draws = [runtime.draw(temperature=1.5, top_p=0.95, seed=i) for i in range(len(texts))]
    pool, slots = runtime.empty_pool(len(texts)), list(range(len(texts)))
    found = runtime.run(pool, slots, [0] * len(texts), texts, draws)
    for text, draw, token in zip(texts, draws, found, strict=True):
        assert runtime.run(runtime.empty_pool(1), [0], [0], [text], [draw]) == [token]


@pytest.mark.parametrize("scale", [1e-39, 3e-38])
@pytest.mark.parametrize("level", levels())
def test_subnormal_numbers_have_the_same_bits_in_few_rows_and_in_many(
    level: str, scale: float
) -> None:
    """Units that take these for zero multiply some numbers of rows, and vectors others."""
    config, weights = small_model("gated")
    norm = {"norm.weight": weights["norm.weight"] * np.float32(scale)}
    runtime = Runtime(config, {**weights, **norm}, "bfloat16", 1, level)
    tokens, slots = random_tokens(config, 20), [*range(20)]
    rows = {}
    for num in (1, 2, 3, 20):
        pool, draw = runtime.empty_pool(20), runtime.draw(temperature=0.0)
        runtime.run(pool, slots[:num], [0] * num, [[t] for t in tokens[:num]], [draw] * num)
        rows[num] = [row.tobytes() for row in runtime.logits()]
    assert all(found == rows[20][:num] for num, found in rows.items())


@pytest.mark.parametrize("level", [level for level in levels() if level != "v2"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_levels_with_a_fused_multiply_add_agree(name: str, dtype: str, level: str) -> None:
    """But for bfloat16 where it rounds the inputs, and adds them up in an order of its own."""
    text, chance = sequences(name, (70,)), random.Random(0)
    found = together(small_runtime(name, dtype, 1, level), text, chance, 70)
    wanted = together(small_runtime(name, dtype, 1, FUSED), text, chance, 70)
    is_different = dtype == "bfloat16" and level in ROUNDING_LEVELS and level != FUSED
    assert (found == wanted) is not is_different
