"""GGUF's Q4_K as it is in the file: next to int8, in every family, the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from model.architectures.config import Config
from model.architectures.lfm2.config import Lfm2Config
from model.architectures.mamba.config import MambaConfig
from model.architectures.mamba2.config import Mamba2Config
from model.native.runtime import Runtime, levels
from tests import arwkv7, mamba, rwkv7
from tests.model.ops.cpu.hybrids import config_of, drawn_for
from tests.model.ops.cpu.models import FUSED, Shape, feed, make_model, random_tokens
from tests.model.ops.cpu.test_precisions import check_one_product, one_product, to_int8
from tests.q4k import BLOCK, Q4KWeights, q4k_blocks
from tests.weights import weights_of

Float = npt.NDArray[np.float32]
Drawn = tuple[Config, Mapping[str, Float]]

#: What inputs rounded to 127 steps change in all layers, relative to the largest logit.
TOLERANCE = 0.06
RANKS = (5, 3, 2, 7)


def own() -> Drawn:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    model = make_model(Shape(sizes).config("gated"))
    return model.config, weights_of(model)


def time_mix() -> Drawn:
    shape = rwkv7.Shape(97, 256, 2, 64, 512, RANKS)
    return shape.config, rwkv7.our_weights(shape, rwkv7.published(shape))


def linear_qwen() -> Drawn:
    shape = arwkv7.Shape(97, 256, 2, 64, 512, RANKS, gate=True)
    return shape.config, arwkv7.our_weights(shape, arwkv7.published(shape))


def first_mamba() -> Drawn:
    config = MambaConfig(310, 256, 2, inner_size=256, dt_rank=4)
    return config, mamba.drawn_for(config)


def second_mamba() -> Drawn:
    config = Mamba2Config(310, 256, 2, num_attention_heads=4, head_dim=128, state_size=16)
    return config, mamba.drawn_for(config)


def qwen() -> Drawn:
    config = replace(config_of("qwen35"), hidden_size=256, intermediate_size=512)
    return config, drawn_for(config)


def lfm() -> Drawn:
    config = config_of("lfm2-square")
    assert isinstance(config, Lfm2Config)
    config = replace(config, hidden_size=512, num_attention_heads=8, head_dim=64)
    return config, drawn_for(config)


FAMILIES: dict[str, Callable[[], Drawn]] = {
    "gated": own,
    "rwkv7": time_mix,
    "arwkv7": linear_qwen,
    "mamba": first_mamba,
    "mamba2": second_mamba,
    "qwen35": qwen,
    "lfm2": lfm,
}
#: Matrices that the files have in more bits, as those of Q4_K_M do.
OTHERS = ("embedding.weight", ".value.weight", ".out.weight", ".v.weight")


@cache
def mixed(name: str) -> tuple[Config, Q4KWeights]:
    """A model whose matrices are Q4_K where their width allows it and the file has no others."""
    config, weights = FAMILIES[name]()
    blocks = {
        key: q4k_blocks(*weight.shape, seed)
        for seed, (key, weight) in enumerate(weights.items())
        if weight.ndim == 2 and key.endswith(".weight") and not key.endswith(OTHERS)
        if weight.shape[1] % BLOCK == 0
    }
    assert blocks, name
    return config, Q4KWeights(weights, blocks)


@cache
def runtime_of(name: str, threads: int = 1, level: str | None = None) -> Runtime:
    config, weights = mixed(name)
    return Runtime(config, weights, "int4", threads, level)


def logits_and_state(runtime: Runtime, tokens: list[int]) -> tuple[bytes, bytes]:
    """After a text in one call."""
    pool = runtime.empty_pool(1)
    runtime.run(pool, [0], [0], [tokens], [runtime.draw(temperature=0.0)])
    return runtime.logits()[0].tobytes(), pool[0].tobytes()


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize(("width", "vocab_size"), [(256, 17), (768, 300)])
def test_product_is_that_of_the_numbers_in_the_file(
    level: str, width: int, vocab_size: int
) -> None:
    model, weights = one_product(width, vocab_size)
    stored = Q4KWeights(weights, {"head.weight": q4k_blocks(vocab_size, width)})
    tables = to_int8(weights["embedding.weight"]), stored.numbers["head.weight"]
    check_one_product(Runtime(model.config, stored, "int4", level=level), weights, *tables)


def test_matrix_takes_little_more_than_in_the_file() -> None:
    model, weights = one_product(512, 1024)
    blocks = q4k_blocks(1024, 512)
    stored = Q4KWeights(weights, {"head.weight": blocks})
    sizes = [
        Runtime(model.config, each, "int4").num_bytes for each in (stored, Q4KWeights(weights, {}))
    ]
    num_bytes = sizes[0] - sizes[1] + 1024 * (512 + 4)  # int8 has a scale for a row
    assert blocks.nbytes < num_bytes < 1.05 * blocks.nbytes


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("at", [1, 3])
def test_scale_that_is_not_finite_gives_no_finite_logits(level: str, at: int) -> None:
    """Whether it is the scale of the steps or that of the bounds."""
    model, weights = one_product(256, 40)
    blocks = q4k_blocks(40, 256)
    blocks[7, at] = 0x7C  # an exponent of ones
    runtime = Runtime(
        model.config, Q4KWeights(weights, {"head.weight": blocks}), "int4", level=level
    )
    found = feed(runtime, runtime.empty_pool(1), 0, list(range(9)))
    assert not np.isfinite(found[:, 7]).any()
    assert np.isfinite(np.delete(found, 7, axis=1)).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_model_is_that_of_its_numbers(name: str) -> None:
    config, weights = mixed(name)
    tokens = random_tokens(config, 40)
    exact = Runtime(config, weights.numbers, "float32")
    wanted = feed(exact, exact.empty_pool(1), 0, tokens)
    runtime = runtime_of(name)
    found = feed(runtime, runtime.empty_pool(1), 0, tokens)
    error = np.abs(found - wanted).max(-1) / np.abs(wanted).max(-1)
    assert 0 < np.median(error) <= TOLERANCE


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 8, 13, 64, 200])
def test_any_number_of_rows_is_the_same(rows: int, threads: int) -> None:
    runtime = runtime_of("gated", threads)
    tokens = random_tokens(runtime.config, rows)
    pool, draw = runtime.empty_pool(rows), runtime.draw(temperature=0.0)
    runtime.run(pool, list(range(rows)), [0] * rows, [[token] for token in tokens], [draw] * rows)
    for slot, logits in enumerate(runtime.logits()):
        alone = logits_and_state(runtime_of("gated"), tokens[slot : slot + 1])
        assert (logits.tobytes(), pool[slot].tobytes()) == alone


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_is_its_tokens_one_by_one(name: str) -> None:
    runtime = runtime_of(name)
    tokens = random_tokens(runtime.config, 30)
    pool = runtime.empty_pool(1)
    last = feed(runtime, pool, 0, tokens)[-1]
    assert (last.tobytes(), pool[0].tobytes()) == logits_and_state(runtime, tokens)


@pytest.mark.parametrize("level", [level for level in levels() if level != "v2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_levels_with_a_fused_multiply_add_agree(name: str, level: str) -> None:
    tokens = random_tokens(mixed(name)[0], 30)
    found, wanted = (logits_and_state(runtime_of(name, 1, each), tokens) for each in (level, FUSED))
    assert found == wanted
