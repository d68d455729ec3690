"""Blocks of GGUF as they are: next to int8, in every family, the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from model.architectures.config import Config
from model.families.jamba.config import JambaConfig
from model.families.lfm2.config import Lfm2Config
from model.families.mamba.config import Mamba2Config, MambaConfig
from model.families.mamba2_hybrid.config import Mamba2HybridConfig
from model.native.runtime import Runtime, levels
from tests import arwkv7, mamba, rwkv7
from tests.gguf_blocks import KINDS, BlockWeights, put_scale, random_blocks, size_of
from tests.model.ops.cpu.hybrids import config_of, drawn_for
from tests.model.ops.cpu.models import FUSED, Shape, feed, make_model, random_tokens
from tests.model.ops.cpu.test_precisions import check_one_product, one_product, to_int8
from tests.model.representatives import chosen
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


def mamba_hybrid() -> Drawn:
    config = config_of("falcon-h1")
    assert isinstance(config, Mamba2HybridConfig)
    heads = {"num_attention_heads": 4, "head_dim": 64, "num_mamba_heads": 8, "mamba_head_dim": 32}
    config = replace(config, hidden_size=256, intermediate_size=512, **heads)
    return config, drawn_for(config)


def jamba() -> Drawn:
    config = config_of("jamba")
    assert isinstance(config, JambaConfig)
    config = replace(config, hidden_size=256, intermediate_size=512, inner_size=512, dt_rank=32)
    return config, drawn_for(config)


FAMILIES: dict[str, Callable[[], Drawn]] = {
    "gated": own,
    "rwkv7": time_mix,
    "arwkv7": linear_qwen,
    "mamba": first_mamba,
    "mamba2": second_mamba,
    "qwen35": qwen,
    "lfm2": lfm,
    "mamba2_hybrid": mamba_hybrid,
    "jamba": jamba,
}
#: Matrices that the files have in more bits, as those of Q4_K_M do.
OTHERS = ("embedding.weight", ".value.weight", ".out.weight", ".v.weight")
CASES = chosen(FAMILIES, list(KINDS))
WIDTHS = {
    "Q4_1": [32, 608],
    "Q8_0": [32, 608],
    "Q4_K": [256, 768],
    "Q5_K": [512],
    "Q6_K": [256, 768],
    "IQ4_XS": [256],
    "IQ4_NL": [32, 608],
}


@cache
def mixed(name: str, kind: str) -> tuple[Config, BlockWeights]:
    """A model with matrices of ``kind`` where their width allows it and the file has no others."""
    config, weights = FAMILIES[name]()
    blocks = {
        key: random_blocks(kind, *weight.shape, seed)
        for seed, (key, weight) in enumerate(weights.items())
        if weight.ndim == 2 and key.endswith(".weight") and not key.endswith(OTHERS)
        if weight.shape[1] % size_of(kind)[0] == 0
    }
    assert blocks, name
    return config, BlockWeights(weights, kind, blocks)


@cache
def runtime_of(name: str, kind: str, threads: int = 1, level: str | None = None) -> Runtime:
    config, weights = mixed(name, kind)
    return Runtime(config, weights, "int4", threads, level)


def logits_and_state(runtime: Runtime, tokens: list[int]) -> tuple[bytes, bytes]:
    """After a text in one call."""
    pool = runtime.empty_pool(1)
    runtime.run(pool, [0], [0], [tokens], [runtime.draw(temperature=0.0)])
    return runtime.logits()[0].tobytes(), pool[0].tobytes()


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("vocab_size", [17, 300])
@pytest.mark.parametrize(
    ("kind", "width"), [(kind, width) for kind, widths in WIDTHS.items() for width in widths]
)
def test_product_is_that_of_the_numbers_in_the_file(
    level: str, kind: str, width: int, vocab_size: int
) -> None:
    """Also of rows that are zero in all bits, or by their scale."""
    model, weights = one_product(width, vocab_size)
    blocks = random_blocks(kind, vocab_size, width)
    blocks[3] = 0
    put_scale(blocks.reshape(vocab_size, -1, size_of(kind)[1])[4], KINDS[kind].at, np.zeros(1))
    stored = BlockWeights(weights, kind, {"head.weight": blocks})
    tables = to_int8(weights["embedding.weight"]), stored.numbers["head.weight"]
    check_one_product(Runtime(model.config, stored, "int4", level=level), weights, *tables)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_embedding_is_looked_up_in_eight_bits(level: str, kind: str) -> None:
    """Those of the file where they are Q8_0, as in a head that is the same matrix."""
    model, weights = one_product(96, 40)
    tied = random_blocks(kind, 40, 96)
    stored = BlockWeights(weights, kind, {"embedding.weight": tied, "head.weight": tied})
    numbers = stored.numbers["head.weight"]
    runtime = Runtime(model.config, stored, "int4", level=level)
    check_one_product(runtime, weights, numbers if kind == "Q8_0" else to_int8(numbers), numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_matrix_takes_little_more_than_in_the_file(kind: str) -> None:
    model, weights = one_product(512, 1024)
    blocks = random_blocks(kind, 1024, 512)
    stored = BlockWeights(weights, kind, {"head.weight": blocks})
    sizes = [
        Runtime(model.config, each, "int4").num_bytes
        for each in (stored, BlockWeights(weights, kind, {}))
    ]
    num_bytes = sizes[0] - sizes[1] + 1024 * (512 + 4)  # int8 has a scale for a row
    assert blocks.nbytes <= num_bytes < 1.05 * blocks.nbytes


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize(
    ("kind", "at"),
    [
        (kind, form.at + 2 * more)
        for kind, form in KINDS.items()
        for more in range(1 + (form.bound > 0))
    ],
)
def test_scale_that_is_not_finite_gives_no_finite_logits(level: str, kind: str, at: int) -> None:
    """Whether it is the scale of the steps or that of the bounds."""
    model, weights = one_product(256, 40)
    blocks = random_blocks(kind, 40, 256)
    blocks[7, at + 1] = 0x7C  # an exponent of ones
    stored = BlockWeights(weights, kind, {"head.weight": blocks})
    runtime = Runtime(model.config, stored, "int4", level=level)
    found = feed(runtime, runtime.empty_pool(1), 0, list(range(9)))
    assert not np.isfinite(found[:, 7]).any()
    assert np.isfinite(np.delete(found, 7, axis=1)).all()


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_model_is_that_of_its_numbers(name: str, kind: str) -> None:
    config, weights = mixed(name, kind)
    tokens = random_tokens(config, 40)
    exact = Runtime(config, weights.numbers, "float32")
    wanted = feed(exact, exact.empty_pool(1), 0, tokens)
    runtime = runtime_of(name, kind)
    found = feed(runtime, runtime.empty_pool(1), 0, tokens)
    error = np.abs(found - wanted).max(-1) / np.abs(wanted).max(-1)
    assert 0 < np.median(error) <= TOLERANCE


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 13, 64, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_rows_is_the_same(kind: str, rows: int, threads: int) -> None:
    check_rows(runtime_of("gated", kind, threads), runtime_of("gated", kind), rows)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("kind", KINDS)
def test_step_in_two_halves_is_the_same(kind: str, level: str) -> None:
    check_rows(runtime_of("gated", kind, 3, level), runtime_of("gated", kind, 1, level), 61)


@pytest.mark.parametrize("level", levels())
def test_layers_may_have_more_bytes_than_the_first(level: str) -> None:
    """The states of a half are updated once each, however its updates are shared out."""
    config, weights = FAMILIES["gated"]()
    blocks = {
        key: random_blocks("Q4_K", *weight.shape, seed)
        for seed, (key, weight) in enumerate(weights.items())
        if weight.ndim == 2 and ".0." in key and weight.shape[1] % 256 == 0
    }
    stored = BlockWeights(weights, "Q4_K", blocks)
    one, three = (Runtime(config, stored, "int4", threads, level) for threads in (1, 3))
    assert one.held == "int4+q4_k"
    check_rows(three, one, 61)


def check_rows(runtime: Runtime, single: Runtime, rows: int) -> None:
    """A batch of so many sequences has the bits that ``single`` gives each of them."""
    tokens = random_tokens(runtime.config, rows)
    pool, draw = runtime.empty_pool(rows), runtime.draw(temperature=0.0)
    runtime.run(pool, list(range(rows)), [0] * rows, [[token] for token in tokens], [draw] * rows)
    for slot, logits in enumerate(runtime.logits()):
        alone = logits_and_state(single, tokens[slot : slot + 1])
        assert (logits.tobytes(), pool[slot].tobytes()) == alone


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_prompt_is_its_tokens_one_by_one(name: str, kind: str) -> None:
    runtime = runtime_of(name, kind)
    tokens = random_tokens(runtime.config, 30)
    pool = runtime.empty_pool(1)
    last = feed(runtime, pool, 0, tokens)[-1]
    assert (last.tobytes(), pool[0].tobytes()) == logits_and_state(runtime, tokens)


@pytest.mark.parametrize("level", [level for level in levels() if level != "v2"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_levels_with_a_fused_multiply_add_agree(name: str, kind: str, level: str) -> None:
    tokens = random_tokens(mixed(name, kind)[0], 30)
    found, wanted = (
        logits_and_state(runtime_of(name, kind, 1, each), tokens) for each in (level, FUSED)
    )
    assert found == wanted


def test_matrices_of_one_file_may_have_any_of_the_types() -> None:
    """Each is held as its own."""
    config, weights = FAMILIES["rwkv7"]()
    names = [name for name, weight in weights.items() if name.endswith("channel_mix.key.weight")]
    names += ["head.weight"]
    kinds = dict(zip(names, ("IQ4_XS", "Q6_K", "Q5_K"), strict=True))
    blocks = {
        name: random_blocks(kind, *weights[name].shape, seed)
        for seed, (name, kind) in enumerate(kinds.items())
    }
    stored = BlockWeights(weights, "Q4_K", blocks, kinds)
    runtime = Runtime(config, stored, "int4")
    assert runtime.held == "int4+iq4_xs+q5_k+q6_k"
    exact = Runtime(config, stored.numbers, "int8")
    tokens = random_tokens(config, 40)
    found, wanted = (feed(each, each.empty_pool(1), 0, tokens) for each in (runtime, exact))
    error = np.abs(found - wanted).max(-1) / np.abs(wanted).max(-1)
    assert 0 < np.median(error) <= TOLERANCE


@pytest.mark.parametrize("name", ["lfm2", "qwen35"])
def test_matrix_of_which_some_rows_are_of_another_type_is_int8(name: str) -> None:
    """q, k and v of an attention layer are one here; in files of Q4_K_M v may have more bits."""
    config, weights = FAMILIES[name]()
    kinds = {key: "Q4_K" for key in weights if key.endswith(("mixer.q.weight", "mixer.k.weight"))}
    kinds |= {key: "Q6_K" for key in weights if key.endswith("mixer.v.weight")}
    stacked = tuple(kinds)
    kinds |= {key: "Q6_K" for key in weights if key.endswith(("mlp.gate.weight", "mlp.up.weight"))}
    assert len(stacked) >= 3
    assert len(kinds) > len(stacked)
    blocks = {
        key: random_blocks(kind, *weights[key].shape, seed)
        for seed, (key, kind) in enumerate(kinds.items())
    }
    stored = BlockWeights(weights, "Q4_K", blocks, kinds)
    found = Runtime(config, stored, "int4")
    assert found.held == "int4+q6_k"  # gate and up, which are one too, and of one type
    others = {key: each for key, each in blocks.items() if key not in stacked}
    wanted = Runtime(config, BlockWeights(stored.numbers, "Q4_K", others, kinds), "int4")
    tokens = random_tokens(config, 40)
    assert found.num_bytes == wanted.num_bytes
    assert logits_and_state(found, tokens) == logits_and_state(wanted, tokens)
    exact = Runtime(config, stored.numbers, "float32")
    errors = [
        np.abs(after - exactly).max() / np.abs(exactly).max()
        for after, exactly in zip(
            *(feed(each, each.empty_pool(1), 0, tokens) for each in (found, exact)), strict=True
        )
    ]
    assert 0 < np.median(errors) <= TOLERANCE
