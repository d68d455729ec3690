"""The contract that every registered mechanism keeps, against its float64 oracle.

A mechanism gets these tests by being in `MECHANISMS` and having an oracle.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

from model.attention import MECHANISMS, mechanism
from model.attention.base import Attention, State
from model.config import ModelConfig
from tests.model.attention.oracles import ORACLES

#: name of the mechanism -> option sets it is tested with, beside its defaults.
VARIANTS: dict[str, list[dict[str, object]]] = {"gated": [{"conv_size": 0}, {"conv_size": 2}]}
CASES = [(name, o) for name in MECHANISMS for o in ({}, *VARIANTS.get(name, []))]
LENGTHS = [1, 63, 64, 65]
OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 2e-5, 1e-4


@pytest.fixture(params=CASES, ids=lambda case: "-".join([case[0], *map(str, case[1].values())]))
def layer(request: pytest.FixtureRequest) -> Attention:
    name, options = request.param
    config = ModelConfig(
        vocab_size=257,
        hidden_size=24,
        num_attention_heads=2,
        head_dim=8,
        attention=name,
        attention_options=options,
    )
    layer = mechanism(name)(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return layer


def test_every_mechanism_has_an_oracle() -> None:
    assert ORACLES.keys() == MECHANISMS.keys()


@pytest.mark.parametrize("length", LENGTHS)
def test_parallel_equals_definition(layer: Attention, length: int) -> None:
    x = inputs(length)
    wanted, _ = oracle(layer, x)
    assert_close(layer.parallel(x), wanted)


@pytest.mark.parametrize("length", LENGTHS)
def test_one_chunk_equals_definition(layer: Attention, length: int) -> None:
    x = inputs(length)
    wanted, wanted_state = oracle(layer, x)
    y, state = run(layer, x, [length])
    assert_close(y, wanted)
    assert_states_close(state, wanted_state)


@pytest.mark.parametrize("length", LENGTHS)
def test_steps_equal_definition(layer: Attention, length: int) -> None:
    x = inputs(length)
    wanted, wanted_state = oracle(layer, x)
    y, state = steps(layer, x)
    assert_close(y, wanted)
    assert_states_close(state, wanted_state)


@pytest.mark.parametrize("seed", range(4))
def test_any_chunking_equals_definition(layer: Attention, seed: int) -> None:
    length = 200
    x = inputs(length)
    wanted, wanted_state = oracle(layer, x)
    y, state = run(layer, x, random_split(length, seed))
    assert_close(y, wanted)
    assert_states_close(state, wanted_state)


def test_chunks_and_steps_mix(layer: Attention) -> None:
    x = inputs(130)
    wanted, _ = oracle(layer, x)
    first, state = run(layer, x[:, :65], [64, 1])
    second, state = steps(layer, x[:, 65:70], state, 65)
    third, _ = run(layer, x[:, 70:], [60], state, 70)
    assert_close(torch.cat([first, second, third], dim=1), wanted)


@pytest.mark.parametrize("form", ["parallel", "chunks", "steps"])
def test_gradients_equal_definition(layer: Attention, form: str) -> None:
    length = 65
    x = inputs(length).requires_grad_()
    weight = inputs(length, seed=7)
    y = {
        "parallel": lambda: layer.parallel(x),
        "chunks": lambda: run(layer, x, [20, 45])[0],
        "steps": lambda: steps(layer, x)[0],
    }[form]()
    (y * weight).sum().backward()

    x64 = x.detach().double().requires_grad_()
    weights64 = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    wanted = ORACLES[layer.config.attention](layer, weights64, x64)[0]
    (wanted * weight.double()).sum().backward()

    assert x.grad is not None
    assert x64.grad is not None
    assert_close(x.grad, x64.grad, GRADIENT_TOLERANCE)
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert weights64[name].grad is not None, name
        assert_close(parameter.grad, weights64[name].grad, GRADIENT_TOLERANCE)


def test_gradient_flows_through_the_state(layer: Attention) -> None:
    x = inputs(40).requires_grad_()
    y, _ = run(layer, x, [20, 20])
    y[:, 20:].sum().backward()
    assert x.grad is not None
    assert x.grad[:, :20].abs().max() > 0


def test_rows_do_not_mix(layer: Attention) -> None:
    x = inputs(70)
    y, state = run(layer, x, [70])
    alone, alone_state = run(layer, x[1:], [70])
    assert_close(y[1:], alone.double())
    for name, tensor in alone_state.items():
        assert_close(state[name][1:], tensor.double())


def test_future_never_changes_the_past(layer: Attention) -> None:
    x = inputs(100)
    changed = x.clone()
    changed[:, 50] = 1e4
    assert torch.equal(layer.parallel(x)[:, :50], layer.parallel(changed)[:, :50])


def test_arguments_are_not_changed(layer: Attention) -> None:
    _, state = run(layer, inputs(10), [10])
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    layer.chunk(inputs(70), state, positions(10))
    layer.step(inputs(1)[:, 0], state, positions(10))
    for name, tensor in before.items():
        assert torch.equal(state[name], tensor)


def test_state_has_the_promised_shape_and_type(layer: Attention) -> None:
    if not layer.constant_state:
        assert {n: t.shape[2] for n, t in run(layer, inputs(70), [70])[1].items()} == {
            "k": 70,
            "v": 70,
        }
        return
    spec = layer.state_spec(layer.config)
    low = inputs(70).bfloat16()
    _, state = copy.deepcopy(layer).bfloat16().chunk(low, layer.empty_state(2, CPU), positions(0))
    _, stepped = copy.deepcopy(layer).bfloat16().step(low[:, 0], state, positions(70))
    for after in (state, stepped):
        assert after.keys() == spec.keys()
        for name, tensor in after.items():
            assert tensor.shape == (2, *spec[name].shape)
            assert tensor.dtype == spec[name].dtype != torch.bfloat16


def test_zeros_are_the_empty_state(layer: Attention) -> None:
    x = inputs(30)
    assert all(not tensor.any() for tensor in layer.empty_state(2, CPU).values())
    assert_close(run(layer, x, [30])[0], layer.parallel(x).double())


CPU = torch.device("cpu")


def inputs(length: int, seed: int = 3) -> Tensor:
    return torch.randn(2, length, 24, generator=torch.Generator().manual_seed(seed))


def positions(start: int) -> Tensor:
    return torch.full((2,), start, dtype=torch.int64)


def oracle(layer: Attention, x: Tensor) -> tuple[Tensor, State]:
    weights = {n: p.detach().double() for n, p in layer.named_parameters()}
    return ORACLES[layer.config.attention](layer, weights, x.double())


def run(
    layer: Attention, x: Tensor, sizes: list[int], state: State | None = None, start: int = 0
) -> tuple[Tensor, State]:
    state = layer.empty_state(len(x), CPU) if state is None else state
    outputs = []
    for part in x.split(sizes, dim=1):
        where = torch.full((len(x),), start, dtype=torch.int64)
        y, state = layer.chunk(part, state, where)
        outputs.append(y)
        start += part.shape[1]
    return torch.cat(outputs, dim=1), state


def steps(
    layer: Attention, x: Tensor, state: State | None = None, start: int = 0
) -> tuple[Tensor, State]:
    state = layer.empty_state(len(x), CPU) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        y, state = layer.step(x[:, t], state, positions(start + t))
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def random_split(length: int, seed: int) -> list[int]:
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(seed))[: 3 + seed] + 1
    edges = [0, *sorted(cuts.tolist()), length]
    return [b - a for a, b in itertools.pairwise(edges)]


def assert_close(actual: Tensor, wanted: Tensor, tolerance: float = OUTPUT_TOLERANCE) -> None:
    error = (actual.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9)
    assert error <= tolerance, f"relative error {error:.2e}"


def assert_states_close(actual: State, wanted: State) -> None:
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if tensor.numel():
            assert_close(actual[name], tensor)
