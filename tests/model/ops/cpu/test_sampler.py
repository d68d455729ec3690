"""The native draw against its definition in `tests.draws`, and the log-probability of its token."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.native.runtime import DTYPES, NOT_FINITE, Draw, Runtime
from model.ops.cpu import _native
from server.engine.sampling import MIN_TEMPERATURE
from server.engine.torch_runner import uniform
from server.engine.types import Dry
from tests.draws import (
    KINDS,
    REPETITIONS,
    SIGMA,
    SIGMA_OF,
    TYPICAL,
    TYPICAL_OF,
    XTC,
    XTC_OF,
    Logits,
    Mask,
    Params,
    allowed,
    kept_counts,
    mask_of,
    random_logits,
    random_mask,
    random_params,
    random_recent,
)
from tests.model.ops.cpu.models import (
    NAMES,
    Shape,
    make_model,
    random_tokens,
    small_runtime,
    small_weights,
)
from tests.weights import weights_of


def native(
    logits: Logits,
    params: Params,
    position: int = 0,
    recent: Sequence[int] = (),
    mask: Mask | None = None,
) -> int:
    return _native.sample(logits, draw_of(params), position, list(recent), mask)


def draw_of(params: Params) -> Draw:
    return small_runtime("elu").draw(**vars(params))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab_size", "num_draws"),
    [(1, 50), (17, 2000), (31, 300), (32, 300), (300, 2000), (8192, 400), (32000, 100)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_draw_equals_definition(vocab_size: int, num_draws: int, kind: str) -> None:
    chance, sure = np.random.default_rng(vocab_size), 0
    for position in range(num_draws):
        logits = random_logits(chance, kind, vocab_size)
        params, mask = random_params(chance, vocab_size), random_mask(chance, vocab_size)
        recent = random_recent(chance, vocab_size)
        wanted = allowed(logits, params, position, recent, mask)
        assert native(logits, params, position, recent, mask) in wanted, (params, position)
        sure += len(wanted) == 1
    assert sure >= 0.8 * num_draws


@given(
    logits=st.lists(st.integers(-4000, 4000), min_size=1, max_size=40),
    temperature=st.floats(MIN_TEMPERATURE, 100.0),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
    typical_p=st.floats(0.0, 1.0, exclude_min=True),
    top_n_sigma=st.floats(0.0, 100.0) | st.floats(0.0, 3.0),
    xtc=st.tuples(st.floats(0.0, 1.0), st.floats(1e-3, 1.0)),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**62),
)
@settings(max_examples=150, deadline=None)
def test_any_draw_equals_definition(
    logits: list[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    top_n_sigma: float,
    xtc: tuple[float, float],
    seed: int,
    position: int,
) -> None:
    given = {"typical_p": typical_p, "top_n_sigma": top_n_sigma}
    given |= {"xtc_probability": xtc[0], "xtc_threshold": xtc[1]}
    params = Params(temperature, top_k, top_p, min_p, seed=seed, **given)
    row = np.array(logits, np.float32) / np.float32(64)
    assert native(row, params, position) in allowed(row, params, position, [])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (Params(top_k=3), {0, 1, 2}),
        (Params(top_k=1), {0}),
        (Params(top_p=0.26), {0, 1, 2}),
        (Params(top_p=1e-6), {0}),
        (Params(top_k=5, top_p=0.26, min_p=0.5), {0, 1, 2}),
        (Params(min_p=1.0), set(range(10))),
        (Params(top_n_sigma=1e-9), set(range(10))),
        (Params(top_k=4, xtc_probability=1.0), {3}),
        (Params(), set(range(10))),
    ],
)
def test_ties_keep_the_lowest_ids(params: Params, kept: set[int]) -> None:
    logits = np.zeros(10, np.float32)
    drawn = {native(logits, replace(params, seed=seed)) for seed in range(300)}
    assert drawn == kept


@pytest.mark.parametrize(("params", "kept"), TYPICAL)
def test_typical_keeps_what_is_nearest_to_the_entropy(params: Params, kept: set[int]) -> None:
    logits = np.log(TYPICAL_OF, dtype=np.float32)
    assert {native(logits, replace(params, seed=seed)) for seed in range(300)} == kept


@pytest.mark.parametrize(("params", "kept"), SIGMA)
def test_top_n_sigma_keeps_what_is_near_the_largest(params: Params, kept: set[int]) -> None:
    logits = np.array(SIGMA_OF, np.float32)
    draws = {
        native(logits, replace(params, seed=seed), position)
        for seed in range(300)
        for position in (0, 7)
    }
    assert draws == kept


def test_top_n_sigma_measures_what_is_allowed() -> None:
    """The deviation of 5, 1, 1 and 1 is 1.73, and that of all of them more than 400."""
    logits = np.array([5.0, 1.0, -999.0, 1.0, 1.0], np.float32)
    mask, params = mask_of([0, 1, 3, 4], 1), Params(top_n_sigma=2.0, temperature=100.0)
    assert {native(logits, replace(params, seed=i), mask=mask) for i in range(100)} == {0}
    assert {native(logits, replace(params, seed=i)) for i in range(100)} == {0, 1, 3, 4}


@pytest.mark.parametrize(("params", "kept"), XTC)
def test_xtc_drops_all_top_choices_but_the_last(params: Params, kept: set[int]) -> None:
    logits = np.log(XTC_OF, dtype=np.float32)
    assert {native(logits, replace(params, seed=seed)) for seed in range(300)} == kept


def test_xtc_is_applied_as_often_as_its_probability_says() -> None:
    logits = np.log(XTC_OF, dtype=np.float32)
    draw = draw_of(Params(xtc_probability=0.25, xtc_threshold=0.15, seed=3))
    counts = Counter(_native.sample(logits, draw, position, []) for position in range(20_000))
    assert (counts[1] + counts[3]) / 20_000 == pytest.approx(0.75 * 0.7, abs=0.015)


@pytest.mark.parametrize(("text", "dry", "taken"), REPETITIONS)
def test_dry_takes_from_what_continues_a_repetition(
    text: Sequence[int], dry: Dry, taken: dict[int, float]
) -> None:
    runtime = small_runtime("elu")
    pool, plain = runtime.empty_pool(2), runtime.draw(temperature=0.0, penalty_window=256)
    hard = runtime.draw(temperature=0.0, dry=dry, penalty_window=256)
    recent = list(text) or None
    runtime.run(pool, [0, 1], [0, 0], [[1], [1]], [plain, hard], [recent, recent])
    before, after = runtime.logits()
    assert np.flatnonzero(before != after).tolist() == sorted(taken)
    for token, value in taken.items():
        assert before[token] - np.float32(value) == after[token]


@pytest.mark.parametrize("size", [1, 7, 8, 9, 300])
def test_top_n_sigma_of_equal_logits_keeps_all(size: int) -> None:
    """Their deviation is zero to the bit, wherever they are."""
    for value in (0.1, -3e38, 1e-30):
        logits = np.full(size, value, np.float32)
        draw = draw_of(Params(top_n_sigma=1.0))
        found = {_native.sample(logits, draw, position, []) for position in range(20 * size)}
        assert found == set(range(size))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 65, 300])
def test_only_allowed_token_is_drawn(size: int, temperature: float) -> None:
    """However unlikely; a bit beyond the last id counts for nothing."""
    logits = np.linspace(40.0, -40.0, size, dtype=np.float32)
    for token in {0, size // 2, size - 1}:
        mask = mask_of([token, size], size // 32 + 1)
        for seed in range(5):
            assert native(logits, Params(temperature, seed=seed), mask=mask) == token


def test_bias_moves_the_draw_and_no_other() -> None:
    runtime = small_runtime("elu")
    pool, greedy = runtime.empty_pool(2), runtime.draw(temperature=0.0)
    ((first,),) = runtime.run(pool, [0], [0], [[1]], [greedy])
    pool[:] = 0
    biased = runtime.draw(temperature=0.0, logit_bias=((first, -100.0), (9, 99.0), (300, 100.0)))
    assert runtime.run(pool, [0, 1], [0, 0], [[1], [1]], [biased, greedy]) == [[9], [first]]


def test_greedy_takes_the_first_of_the_largest() -> None:
    greedy = Params(temperature=0.0)
    for at, size in itertools.product([0, 1, 15, 16, 17, 299], [300, 301]):
        logits = np.full(size, -3.0, np.float32)
        logits[[at, size - 1]] = 2.5
        assert native(logits, greedy) == at


@pytest.mark.parametrize("params", [Params(), Params(top_k=20, top_p=0.9), Params(0.7)])
def test_frequencies_follow_the_probabilities(params: Params) -> None:
    """Chi-square with 16 degrees of freedom at most; 39.25 is its quantile of 99.9 %."""
    num = 20_000
    logits = np.random.default_rng(3).normal(size=17).astype(np.float32)
    draw = draw_of(replace(params, seed=11))
    counts = Counter(_native.sample(logits, draw, position, []) for position in range(num))
    p = np.exp(logits.astype(np.float64) / params.temperature)
    order = np.argsort(-p)
    (kept,) = kept_counts(p[order] / p.sum(), params)
    p[order[kept:]] = 0.0
    wanted = num * p / p.sum()
    assert counts.keys() == set(order[:kept].tolist())
    assert sum((counts[i] - wanted[i]) ** 2 / wanted[i] for i in order[:kept]) < 39.25


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**63 - 1))
@settings(max_examples=500, deadline=None)
def test_uniform_equals_that_of_the_torch_sampler(seed: int, position: int) -> None:
    assert _native.uniform(seed, position) == uniform(seed, position)


@pytest.mark.parametrize("at", [0, 15, 16, 298, 299])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [Params(), Params(temperature=0.0), Params(top_k=3)])
def test_logits_that_are_not_finite_are_reported(params: Params, value: float, at: int) -> None:
    logits = np.zeros(300, np.float32)
    logits[at] = value
    assert native(logits, params) == NOT_FINITE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["norm", "blocks.1.mlp.down", "blocks.0.attention.qkv"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weight_that_is_not_finite_is_reported(dtype: str, name: str, value: float) -> None:
    model = make_model(Shape().config("elu"))
    weights = weights_of(model)
    weights[f"{name}.weight"].flat[3] = value
    runtime = Runtime(model.config, weights, dtype)
    for temperature in (0.0, 1.0):
        draw = runtime.draw(temperature=temperature)
        assert runtime.run(runtime.empty_pool(1), [0], [0], [[1, 2, 3]], [draw]) == [[NOT_FINITE]]


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("name", NAMES)
def test_attention_does_not_hide_what_is_not_finite(name: str, part: str) -> None:
    """The first channel of each head's q, k or v; k of ``vq`` is only a code, always a number."""
    config, weights = small_weights(name)
    qkv = weights["blocks.0.attention.qkv.weight"].copy()
    qkv[{"q": 0, "k": 16, "v": 32}[part]] = np.nan
    runtime = Runtime(config, weights | {"blocks.0.attention.qkv.weight": qkv}, "float32")
    draw, tokens = runtime.draw(temperature=0.0), random_tokens(config, 20)
    ((drawn,),) = runtime.run(runtime.empty_pool(1), [0], [0], [tokens], [draw])
    assert (drawn == NOT_FINITE) is ((name, part) != ("vq", "k"))


def test_one_row_that_is_not_finite_spoils_no_other() -> None:
    model = make_model(Shape({"tie_word_embeddings": False}).config("gated"))
    weights = weights_of(model)
    weights["embedding.weight"][7] = np.nan
    runtime = Runtime(model.config, weights, "float32")
    pool, draw = runtime.empty_pool(3), runtime.draw(temperature=0.0)
    alone = runtime.run(runtime.empty_pool(1), [0], [0], [[1, 2]], [draw])
    found = runtime.run(pool, [0, 1, 2], [0] * 3, [[1, 2], [1, 7], [1, 2]], [draw] * 3)
    assert found == [*alone, [NOT_FINITE], *alone]
    assert pool[0].tobytes() == pool[2].tobytes()


def test_a_run_draws_for_the_position_after_its_tokens() -> None:
    runtime, length = small_runtime("elu"), 3
    pool, positions = runtime.empty_pool(40), list(range(1000, 1040))
    slots, draw = list(range(40)), runtime.draw(seed=7, temperature=100.0)
    drawn = runtime.run(pool, slots, positions, [[1, 2, 3]] * 40, [draw] * 40)
    (logits,) = {row.tobytes() for row in runtime.logits()}
    row = np.frombuffer(logits, np.float32)
    wanted = [_native.sample(row, draw, p + length, []) for p in positions]
    assert drawn == [[token] for token in wanted]
    assert len(set(wanted)) > 10


def test_penalties_change_no_other_draw() -> None:
    """What is counted for one row is forgotten before the next."""
    runtime = small_runtime("elu")
    pool, greedy = runtime.empty_pool(2), runtime.draw(temperature=0.0)
    ((first,),) = runtime.run(pool, [0], [0], [[1]], [greedy])
    pool[:] = 0
    hard = runtime.draw(temperature=0.0, presence_penalty=2.0, repetition_penalty=100.0)
    found = runtime.run(pool, [0, 1], [0, 0], [[1], [1]], [hard, greedy], [[first, first], [first]])
    assert found[0] != [first]
    assert found[1] == [first]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprob_is_the_score_of_the_drawn_token(dtype: str, threads: int) -> None:
    """To the bit, whatever the draw and the company; nothing for those that do not ask."""
    runtime = small_runtime("gated", dtype, threads)
    ways = [
        Params(),
        Params(temperature=2.0),
        Params(temperature=0.0, frequency_penalty=-99.0),
        Params(top_k=3, repetition_penalty=1.5),
        Params(min_p=0.1, temperature=2.0),
        Params(top_n_sigma=1.0, xtc_probability=1.0, dry=Dry(2.0, allowed_length=1)),
    ]
    asking = [True, False, True, True, True, True]
    draws = [
        runtime.draw(**vars(way), logprob=asks) for way, asks in zip(ways, asking, strict=True)
    ]
    texts = [random_tokens(runtime.config, 3 + 40 * i, seed=i) for i in range(6)]
    pool = runtime.empty_pool(7)
    tokens = runtime.run(pool, list(range(7)), [0] * 7, [*texts, [1]], [*draws, None], [[9]] * 7)
    found = runtime.logprobs()
    for text, (token,), asks, (value,) in zip(texts, tokens[:6], asking, found[:6], strict=True):
        (*_, wanted) = runtime.score(runtime.empty_pool(1), 0, 0, text, token)
        assert value == wanted if asks else np.isnan(value)
    assert tokens[6] == found[6] == []
    assert tokens[2] == [9]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_has_no_logprob(value: float) -> None:
    config, weights = small_weights("elu")
    spoilt = weights["norm.weight"].copy()
    spoilt[3] = value
    runtime = Runtime(config, weights | {"norm.weight": spoilt}, "float32")
    runtime.run(runtime.empty_pool(1), [0], [0], [[1]], [runtime.draw(logprob=True)])
    assert np.isnan(runtime.logprobs()).tolist() == [[True]]
