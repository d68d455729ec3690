"""The sum of the last hidden states equals its definition, to the bit however a text is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.architectures.network import model_of
from model.native.runtime import DTYPES, Runtime
from server.engine.runner import HIDDEN_UNIT
from tests.model.ops.cpu.models import (
    NAMES,
    SERVED,
    Shape,
    defined_hidden,
    make_model,
    random_tokens,
    small_model,
    small_runtime,
    small_weights,
)
from tests.weights import weights_of


@pytest.mark.parametrize("name", NAMES)
def test_sum_equals_definition(name: str) -> None:
    """In float64; the sum of a prefix less that of a shorter one is one token's state."""
    config, weights = small_weights(name)
    tokens = random_tokens(config, 151)
    hidden = defined_hidden(model_of(config, weights), tokens).numpy()
    runtime = small_runtime(name)
    pool = runtime.empty_pool(1)
    found = [runtime.embed(pool, 0, i, [token]) for i, token in enumerate(tokens)]
    bound = 5e-6 * np.abs(hidden).max()
    assert np.abs(np.stack(found) - hidden).max() <= bound
    whole = runtime.embed(runtime.empty_pool(1), 0, 0, tokens)
    assert np.abs(whole - hidden.sum(0)).max() <= len(tokens) * bound
    assert whole.tobytes() == np.sum(found, axis=0).tobytes()


@pytest.mark.parametrize("settings", [{"norm": "layer"}, {"tie_word_embeddings": False}])
def test_either_norm(settings: dict[str, object]) -> None:
    model = make_model(Shape(settings).config("elu"))
    tokens = random_tokens(model.config, 20)
    runtime = Runtime(model.config, weights_of(model), "float32")
    found = runtime.embed(runtime.empty_pool(1), 0, 0, tokens)
    wanted = defined_hidden(model, tokens).sum(0).numpy()
    assert np.abs(found - wanted).max() <= 20 * 5e-6 * np.abs(wanted).max()


@given(
    name=st.sampled_from(SERVED),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_any_cut_and_order_of_addition_is_the_same(
    name: str, dtype: str, threads: int, sizes: list[int], order: object
) -> None:
    config, _ = small_model(name)
    tokens = random_tokens(config, sum(sizes))
    runtime = small_runtime(name, dtype)
    pool, fed = runtime.empty_pool(1), runtime.empty_pool(1)
    wanted = runtime.embed(pool, 0, 0, tokens)
    runtime.run(fed, [0], [0], [tokens], [None])
    assert pool.tobytes() == fed.tobytes()
    other, parts, start = runtime.empty_pool(1), [], 0
    for size in sizes:
        part = tokens[start : start + size]
        parts.append(small_runtime(name, dtype, threads).embed(other, 0, start, part))
        start += size
    order.shuffle(parts)  # type: ignore[attr-defined]
    assert sum(parts[1:], parts[0]).tobytes() == wanted.tobytes()
    assert other.tobytes() == pool.tobytes()


def test_sums_are_whole_units() -> None:
    """Which is what makes them exact, for a million tokens and more."""
    runtime = small_runtime("gated")
    found = runtime.embed(runtime.empty_pool(1), 0, 0, random_tokens(runtime.config, 300))
    units = found / HIDDEN_UNIT
    assert found.dtype == np.float64
    assert (units == np.round(units)).all()
    assert np.abs(units).max() < 2**44


def test_embedding_draws_nothing_and_leaves_no_logits() -> None:
    runtime = small_runtime("gated")
    pool, draw = runtime.empty_pool(2), runtime.draw(top_logprobs=2)
    runtime.run(pool, [0], [0], [[1]], [draw])
    logprobs, tops = runtime.logprobs(), runtime.top_logprobs()
    runtime.embed(pool, 1, 0, [1, 2, 3])
    assert (runtime.logprobs(), runtime.top_logprobs()) == (logprobs, tops)
    assert runtime.logits().shape == (0, runtime.config.vocab_size)


def test_token_that_is_not_finite_spoils_its_sum() -> None:
    model = make_model(Shape({"tie_word_embeddings": False}).config("gated"))
    weights = weights_of(model)
    weights["embedding.weight"][7] = np.nan
    runtime = Runtime(model.config, weights, "float32")
    assert np.isnan(runtime.embed(runtime.empty_pool(1), 0, 0, [1, 7, 2])).all()
    assert np.isfinite(runtime.embed(runtime.empty_pool(1), 0, 0, [1, 2])).all()
