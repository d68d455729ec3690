"""A state may come from outside and hold any bytes: a step gives a result, and touches no other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from model.native.runtime import DTYPES, NOT_FINITE, Runtime, levels
from tests.model.ops.cpu.models import SERVED, random_tokens, small_runtime
from tests.model.representatives import chosen

#: Before, in and after the windows, which are of 7 tokens, and where a cosFormer's epoch turns.
POSITIONS = (0, 3, 7, 16, 1000, 2**40)


def garbage(num_bytes: int) -> Iterator[npt.NDArray[np.uint8]]:
    """All ones, every kind of NaN and infinity, and noise."""
    yield np.full(num_bytes, 0xFF, np.uint8)
    for bits in (0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000):
        yield np.full(num_bytes // 4 + 1, bits, np.uint32).view(np.uint8)[:num_bytes]
    for bits in (0x7FF8 << 48, 0xFFF8 << 48, 0x7FF0 << 48, 2**63 - 1, 1 << 63):
        yield np.full(num_bytes // 8 + 1, bits, np.uint64).view(np.uint8)[:num_bytes]
    chance = np.random.default_rng(3)
    for _ in range(6):
        yield chance.integers(256, size=num_bytes, dtype=np.uint8)


@pytest.mark.parametrize(("name", "level"), chosen(SERVED, levels()))
def test_any_bytes_give_a_result(name: str, level: str) -> None:
    runtime = small_runtime(name, "float32", 1, level)
    pool, draw = runtime.empty_pool(2), runtime.draw(temperature=0.0)
    tokens = random_tokens(runtime.config, 20)
    (wanted,) = runtime.run(pool, [1], [0], [tokens], [draw])
    sound = pool[1].copy()
    for block in garbage(runtime.layout.num_bytes):
        for position in POSITIONS:
            pool[0] = block
            pool[1] = 0
            rows = [tokens[:2], tokens]
            found, other = runtime.run(pool, [0, 1], [position, 0], rows, [draw] * 2)
            assert other == wanted
            assert pool[1].tobytes() == sound.tobytes()
            assert found == [NOT_FINITE] or 0 <= found[0] < runtime.config.vocab_size
            pool[0] = block
            scores = runtime.score(pool, 0, position, tokens[:9], 5)
            assert all(np.isnan(score) or score <= 0 for score in scores)
            pool[0] = block
            runtime.embed(pool, 0, position, tokens[:9])


@pytest.mark.parametrize(("name", "kind"), chosen(SERVED, list(product(DTYPES, levels()))))
def test_steps_of_any_length_leave_nothing_behind(name: str, kind: tuple[str, str]) -> None:
    """How rows lie in the buffers depends on how many a step has, of a dtype and at a level."""
    dtype, level = kind
    runtime = small_runtime(name, dtype, 1, level)
    pool, draw = runtime.empty_pool(2), runtime.draw(temperature=0.0)
    tokens = random_tokens(runtime.config, 8)
    lengths = range(1, len(tokens) + 1)
    wanted = {}
    for length in lengths:
        pool[1] = 0
        found = runtime.run(pool, [1], [0], [tokens[:length]], [draw])
        wanted[length] = found, pool[1].copy()
    for poisoned in lengths:
        for length in lengths:
            pool[0] = 0xFF
            runtime.run(pool, [0], [0], [tokens[:poisoned]], [None])
            pool[1] = 0
            found = runtime.run(pool, [1], [0], [tokens[:length]], [draw])
            assert found == wanted[length][0]
            assert pool[1].tobytes() == wanted[length][1].tobytes()


@pytest.mark.parametrize("name", SERVED)
def test_state_of_ones_is_not_finite(name: str) -> None:
    """Each float is NaN, each integer -1. Some are not read before the window is full."""
    runtime = small_runtime(name)
    draw = runtime.draw(temperature=0.0)
    pool = runtime.empty_pool(1)
    pool.fill(0xFF)
    assert runtime.run(pool, [0], [1000], [[1]], [draw]) == [[NOT_FINITE]]
    pool.fill(0xFF)
    assert np.isnan(runtime.score(pool, 0, 1000, [1, 2], 3)).all()
    pool.fill(0xFF)
    assert np.isnan(runtime.embed(pool, 0, 1000, [1, 2])).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("position", [0, 6, 7, 50])
@pytest.mark.parametrize("code", [-1, -(2**63), 2**63 - 1, 2**32, "num_codes"])
def test_code_that_does_not_exist_is_not_finite(code: int | str, position: int, dtype: str) -> None:
    """Wherever in the window, in any layer and head, and for as long as the state lives."""
    runtime = small_runtime("vq", dtype)
    tokens, draw = random_tokens(runtime.config, 60), runtime.draw(temperature=0.0)
    sound = runtime.empty_pool(1)
    if position:
        runtime.run(sound, [0], [0], [tokens[:position]], [None])
    for layer, place, head in ((0, 0, 0), (1, 6, 1), (1, 3, 0)):
        pool = sound.copy()
        fields = runtime.layout.views(pool)[layer]
        num_codes = fields["count"].shape[-1]
        fields["code"][0, place, head] = num_codes if code == "num_codes" else code
        for at in (position, position + 1):
            assert runtime.run(pool, [0], [at], [[tokens[at]]], [draw]) == [[NOT_FINITE]]
    assert runs(runtime, sound.copy(), position, tokens[position])


@pytest.mark.parametrize("count", [-1, -(2**63), 2**63 - 1])
def test_count_that_cannot_be_is_no_crash(count: int) -> None:
    runtime = small_runtime("vq")
    pool, tokens = runtime.empty_pool(1), random_tokens(runtime.config, 40)
    draw = runtime.draw(temperature=0.0)
    runtime.run(pool, [0], [0], [tokens], [None])
    runtime.layout.views(pool)[0]["count"][...] = count
    assert runtime.run(pool, [0], [40], [tokens], [draw]) == [[NOT_FINITE]]


def runs(runtime: Runtime, pool: npt.NDArray[np.uint8], position: int, token: int) -> bool:
    draw = runtime.draw(temperature=0.0)
    return runtime.run(pool, [0], [position], [[token]], [draw])[0][0] >= 0
