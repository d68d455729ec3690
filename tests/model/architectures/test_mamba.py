"""Mamba models equal those of `transformers` in every form, for any split of a text."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from model.architectures.network import ModelState, Network, model_of
from tests.mamba import SHAPES, drawn, theirs
from tests.model.architectures.forms import (
    assert_bfloat16_is_near,
    assert_gradients_agree,
    chunk,
    parallel,
    random_texts,
    steps,
)
from tests.model.attention.test_contract import assert_close, random_split

#: Theirs is float32 too: its own distance from the equations.
TOLERANCE = 5e-5
#: Half a unit in the last place of bfloat16, over the depth of the model.
BFLOAT16_TOLERANCE = 0.1


@pytest.fixture(params=SHAPES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def model_named(name: str) -> Network:
    return model_of(SHAPES[name], drawn(name))


@pytest.fixture
def model(name: str) -> Network:
    return model_named(name)


@cache
def wanted(name: str, length: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Logits and states of theirs, token by token."""
    network, logits = theirs(name), []
    cache = DynamicCache(config=network.config)
    for token in texts(name, length).unbind(1):
        found = network(token[:, None], cache_params=cache, use_cache=True)
        logits.append(found.logits[:, 0])
    states = [
        {"conv": layer.conv_states[0].mT[:, 1:], "S": layer.recurrent_states[0].mT}
        for layer in cache.layers
    ]
    return torch.stack(logits, dim=1), states


@pytest.mark.parametrize("form", ["parallel", "chunk", "step"])
def test_every_form_equals_transformers(model: Network, name: str, form: str) -> None:
    tokens = texts(name, 40)
    logits, state = {"parallel": parallel, "chunk": chunk, "step": steps}[form](model, tokens)
    wanted_logits, wanted_state = wanted(name, 40)
    assert_close(logits, wanted_logits.double(), TOLERANCE)
    for layer, wanted_layer in zip(state, wanted_state, strict=True) if state else ():
        assert layer.keys() == wanted_layer.keys()
        for key, tensor in wanted_layer.items():
            assert_close(layer[key], tensor.double(), TOLERANCE)


def test_whole_text_of_transformers_is_the_same(model: Network, name: str) -> None:
    tokens = texts(name, 150)
    assert_close(model.parallel(tokens), theirs(name)(tokens).logits.double(), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_chunking_equals_the_steps(model: Network, name: str, seed: int) -> None:
    tokens = texts(name, 200)
    wanted, wanted_state = steps(model, tokens)
    logits, state = chunk(model, tokens, random_split(200, seed))
    assert_close(logits, wanted.double())
    assert_same(state, wanted_state)


def test_rows_do_not_mix(model: Network, name: str) -> None:
    tokens = texts(name, 70)
    logits, _ = chunk(model, tokens, [64, 6])
    for row in range(len(tokens)):
        alone, _ = chunk(model, tokens[row : row + 1], [64, 6])
        assert_close(logits[row], alone[0].double())


@pytest.mark.parametrize("length", [1, 2, 15, 63, 64, 65])
def test_future_never_changes_the_past(model: Network, name: str, length: int) -> None:
    """Not even in rounding."""
    tokens = texts(name, 80)
    changed = tokens.clone()
    changed[:, length:] = (changed[:, length:] + 1) % SHAPES[name].vocab_size
    first, second = (chunk(model, each)[0] for each in (tokens, changed))
    assert torch.equal(first[:, :length], second[:, :length])
    assert not torch.equal(first[:, length], second[:, length])


def test_arguments_are_not_changed(model: Network, name: str) -> None:
    tokens = texts(name, 20)
    _, state = chunk(model, tokens)
    before = copy.deepcopy(state)
    chunk(model, tokens, state=state)
    model.step(tokens[:, 0], state, positions())
    assert_same(state, before, exact=True)


def test_gradients_of_the_forms_agree(model: Network, name: str) -> None:
    assert_gradients_agree(model, texts(name, 24), 1e-4)


def test_bfloat16_is_near_float32_and_keeps_its_state_wide(model: Network, name: str) -> None:
    assert_bfloat16_is_near(model, texts(name, 40), BFLOAT16_TOLERANCE)


def texts(name: str, length: int) -> Tensor:
    return random_texts(SHAPES[name].vocab_size, length)


def positions(num: int = 2) -> Tensor:
    return torch.zeros(num, dtype=torch.int64)


def assert_same(found: ModelState, wanted: ModelState, exact: bool = False) -> None:
    for layer, wanted_layer in zip(found, wanted, strict=True):
        assert layer.keys() == wanted_layer.keys()
        for key, tensor in wanted_layer.items():
            if exact:
                assert torch.equal(layer[key], tensor)
            else:
                assert_close(layer[key], tensor.double())
