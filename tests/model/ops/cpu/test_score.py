"""The log-probabilities of a text's tokens equal their definition, however the text is cut."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.architectures.network import model_of
from model.native.runtime import DTYPES, Runtime
from tests.model.ops.cpu.models import (
    NAMES,
    SERVED,
    Shape,
    defined,
    feed,
    make_model,
    random_tokens,
    small_model,
    small_runtime,
    small_weights,
)
from tests.weights import weights_of

#: More than the native runtime computes logits for at a time, and not a multiple of that.
LENGTH = 300


def log_probabilities(logits: Tensor, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Of ``tokens[1:]``, from logits [len(tokens) - 1, vocabulary]."""
    rows = logits.double().log_softmax(dim=-1)
    found: npt.NDArray[np.float64] = rows[torch.arange(len(rows)), tokens[1:]].numpy()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_scores_equal_definition(name: str) -> None:
    """Within twice the tolerance of logits: a log-softmax moves by at most that."""
    config, weights = small_weights(name)
    tokens = random_tokens(config, 151)
    logits, _ = defined(model_of(config, weights), tokens[:-1])
    runtime = small_runtime(name)
    found = runtime.score(runtime.empty_pool(1), 0, 0, tokens[:-1], tokens[-1])
    error = np.abs(np.array(found) - log_probabilities(logits, tokens)).max()
    assert error <= 2 * 5e-6 * float(logits.abs().max())


@pytest.mark.parametrize("name", ["delta", "vq"])
def test_scores_are_the_log_softmax_of_logits(name: str) -> None:
    config, _ = small_weights(name)
    runtime, tokens = small_runtime(name), random_tokens(config, LENGTH + 1)
    pool, other = runtime.empty_pool(2), runtime.empty_pool(1)
    scores = np.array(runtime.score(pool, 1, 0, tokens[:-1], tokens[-1]))
    logits = torch.from_numpy(feed(runtime, other, 0, tokens[:-1]))
    wanted = log_probabilities(logits, tokens)
    assert np.abs(scores - wanted).max() <= 1e-6 * np.abs(wanted).max()
    assert pool[1].tobytes() == other[0].tobytes()
    assert not pool[0].any()


@given(
    name=st.sampled_from(SERVED),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_any_cut_is_the_same(name: str, dtype: str, threads: int, sizes: list[int]) -> None:
    config, _ = small_model(name)
    tokens = random_tokens(config, sum(sizes) + 1)
    runtime = small_runtime(name, dtype)
    pool = runtime.empty_pool(1)
    wanted = runtime.score(pool, 0, 0, tokens[:-1], tokens[-1])
    other, found, start = runtime.empty_pool(1), [], 0
    for size in sizes:
        end = start + size
        found += small_runtime(name, dtype, threads).score(
            other, 0, start, tokens[start:end], tokens[end]
        )
        start = end
    assert found == wanted
    assert other.tobytes() == pool.tobytes()


@pytest.mark.parametrize("length", [2, 127, 128, 129, 256, 257])
def test_last_token_is_fed_but_not_scored_where_nothing_follows(length: int) -> None:
    runtime = small_runtime("gated")
    tokens = random_tokens(runtime.config, length)
    pool, other = runtime.empty_pool(1), runtime.empty_pool(1)
    assert runtime.score(pool, 0, 0, tokens) == runtime.score(other, 0, 0, tokens, 3)[:-1]
    assert pool.tobytes() == other.tobytes()


def test_padded_ids_have_no_part() -> None:
    """A vocabulary may be padded beyond the tokenizer's."""
    config, weights = small_weights("elu")
    runtime = Runtime(config, weights, "float32", num_ids=200)
    tokens = [token % 200 for token in random_tokens(config, 41)]
    found = runtime.score(runtime.empty_pool(1), 0, 0, tokens[:-1], tokens[-1])
    logits = torch.from_numpy(feed(runtime, runtime.empty_pool(1), 0, tokens[:-1]))
    wanted = log_probabilities(logits[:, :200], tokens)
    assert np.abs(np.array(found) - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_not_finite_from_the_token_on_that_made_it_so() -> None:
    model = make_model(Shape({"tie_word_embeddings": False}).config("gated"))
    weights = weights_of(model)
    weights["embedding.weight"][7] = np.nan
    runtime = Runtime(model.config, weights, "float32")
    tokens = [1, 2, 3, 7, 4, 5]
    found = runtime.score(runtime.empty_pool(1), 0, 0, tokens, 6)
    assert np.isnan(found).tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("id", [1, 130, 255, 256])
def test_one_logit_that_is_not_finite_is_not_hidden(id: int, value: float) -> None:
    model = make_model(Shape({"tie_word_embeddings": False}).config("elu"))
    weights = weights_of(model)
    weights["head.weight"][id, 0] = value
    for num_ids, hides in ((257, False), (id + 1, False), (id, True)):
        runtime = Runtime(model.config, weights, "float32", num_ids=num_ids)
        found = runtime.score(runtime.empty_pool(1), 0, 0, [3, 0], 0)
        assert np.isnan(found).tolist() == [not hides] * 2
