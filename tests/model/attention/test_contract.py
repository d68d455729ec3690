"""The contract that every registered mechanism keeps, against its float64 oracle.

A mechanism gets these tests by being in `MECHANISMS` and having an oracle.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from model.architectures.network import DTYPES
from model.attention import MECHANISMS, spec_of
from model.attention.base import Attention, State, mechanism
from model.config import ModelConfig
from tests.model.attention.oracles import ORACLES
from tests.model.representatives import chosen, is_representative

ROTARY: list[dict[str, object]] = [{"rotary": "before"}, {"rotary": "after"}]
#: name of the mechanism -> option sets it is tested with, apart from its defaults.
VARIANTS: dict[str, list[dict[str, object]]] = {
    "cosformer": [{"horizon": 32}],
    "cosine": [
        {"rotary": "before"},
        {"denominator": "tokens"},
        {"order": 2},
        {"order": 2, "key_dim": 4, "unit_length": False, "denominator": "tokens"},
        {"order": 2, "key_dim": 3, "unit_length": False},
    ],
    "delta": [
        {"conv_size": 0},
        {"decay": False},
        {"key_dim": 4, "gate": False},
        {"negative_eigenvalues": True},
        {"channel_decay": True},
        {"channel_decay": True, "key_dim": 4, "conv_size": 0},
    ],
    "efficient": [{"rotary": "before"}, {"denominator": "weights", "rotary": "before"}],
    "elu": [
        *ROTARY,
        {"rotary": "before", "rope_theta": 100.0},
        {"denominator": "tokens"},
        {"denominator": "tokens", "rotary": "after"},
    ],
    "gated": [{"conv_size": 0}, {"conv_size": 2}, {"key_dim": 4}],
    "normed": [{"map": "elu"}, {"map": "relu"}, {"map": "identity"}, {"key_dim": 4}],
    "performer": [
        {"map": "simplified"},
        {"map": "hyperbolic"},
        {"map": "relu"},
        {"map": "relu", "projection": "trained", "features": 5},
        {"projection": "trained"},
        {"orthogonal": False},
        {"features": 5},
        {"features": 16},
        {"rotary": "before"},
        {"rotary": "before", "rope_theta": 100.0},
    ],
    "rbf": [{"features": 5}, {"rotary": "before"}, {"projection": "trained"}],
    "relu": [*ROTARY, {"rotary": "after", "rope_theta": 100.0}, {"denominator": "tokens"}],
    "retnet": [{"positions": "rotary"}, {"positions": "none"}, {"key_dim": 4}],
    "soft_vq": [{"beta": 4.0}, {"codewords": 5}, {"rotary": "before"}, {"qk_norm": True}],
    "softmax": [{"rotary": "none"}, {"rope_theta": 100.0}],
    "softmax_map": [*ROTARY, {"denominator": "tokens"}],
    "vq": [{"window": 1}, {"window": 7, "codewords": 5}, {"qk_norm": True}],
    "window_linear": [
        {"window": 1},
        {"window": 7, "features": 5},
        {"rotary": "none"},
        {"older": "forgotten"},
        {"older": "forgotten", "window": 7},
    ],
}
#: What every mechanism may have around it, in one case with all of them.
PARTS: dict[str, object] = {"conv_size": 3, "gate": True, "norm": True}
for _name in MECHANISMS:
    _parts = {part: value for part, value in PARTS.items() if part in spec_of(_name).options}
    VARIANTS[_name] = [*VARIANTS.get(_name, []), _parts]
VARIANTS["softmax"] += [{"norm": True}, {"gate": True}, {"conv_size": 2}]
VARIANTS["elu"] += [{"norm": True, "rotary": "after"}, {"gate": True}, {"conv_size": 2}]
VARIANTS["retnet"] += [{"gate": False}]
VARIANTS["dijiang"] += [{"gate": False}, {"published": True}]
Case = tuple[str, dict[str, object]]
DEFAULTS: list[Case] = [(name, {}) for name in MECHANISMS]
CASES: list[Case] = [(name, o) for name in MECHANISMS for o in ({}, *VARIANTS.get(name, []))]
#: A cache that grows has one length for all rows.
CONSTANT = [case for case in CASES if spec_of(case[0]).constant_state]
LENGTHS = [65, 1, 63, 64]
FORMS = ["parallel", "chunks", "steps"]
EXTREMES = [(1e4, 1), (1e-30, 70), (0.0, 1), (0.0, 70)]
OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 2e-5, 1e-4


def case_id(case: Case) -> str:
    return "-".join([case[0], *(f"{name}={value}" for name, value in case[1].items())])


def layers_with(name: str, values: Sequence[Any], cases: Sequence[Case] = CASES) -> Any:
    """Parametrizes ``layer`` and ``name`` by what `chosen` pairs."""
    pairs = [
        pytest.param(case, value, id=f"{case_id(case)}-{value}")
        for case, value in chosen(cases, values)
    ]
    return pytest.mark.parametrize(("layer", name), pairs, indirect=["layer"])


def at_lengths(cases: Sequence[Case] = CASES) -> Any:
    """Representatives at awkward lengths, the others at the one that crosses a block."""
    pairs = [
        pytest.param(case, length, id=f"{case_id(case)}-{length}")
        for case in cases
        for length in (LENGTHS if is_representative(case) else LENGTHS[:1])
    ]
    return pytest.mark.parametrize(("layer", "length"), pairs, indirect=["layer"])


@pytest.fixture(params=CASES, ids=case_id)
def layer(request: pytest.FixtureRequest) -> Attention:
    return make_layer(*request.param)


def make_layer(name: str, options: dict[str, object], **settings: object) -> Attention:
    """A small layer, frozen where it would learn by itself, with weights of every kind set."""
    shape = {"vocab_size": 257, "hidden_size": 24, "num_attention_heads": 2, "head_dim": 8}
    config = ModelConfig(
        attention=name,
        attention_options=options,
        **{**shape, **settings},  # type: ignore[arg-type]
    )
    layer = mechanism(name)(config).eval()
    generator = torch.Generator().manual_seed(1)
    layer.reset_parameters(generator)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return layer


def test_every_mechanism_has_an_oracle() -> None:
    assert ORACLES.keys() == MECHANISMS.keys()


@at_lengths()
def test_parallel_equals_definition(layer: Attention, length: int) -> None:
    x = inputs(length)
    wanted, _ = oracle(layer, x)
    assert_close(layer.parallel(x), wanted)


@at_lengths()
def test_one_chunk_equals_definition(layer: Attention, length: int) -> None:
    x = inputs(length)
    wanted, wanted_state = oracle(layer, x)
    y, state = run(layer, x, [length])
    assert_close(y, wanted)
    assert_states_close(state, wanted_state)


@at_lengths()
def test_steps_equal_definition(layer: Attention, length: int) -> None:
    x = inputs(length)
    wanted, wanted_state = oracle(layer, x)
    y, state = steps(layer, x)
    assert_close(y, wanted)
    assert_states_close(state, wanted_state)


@layers_with("seed", range(4))
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


@pytest.mark.slow
@layers_with("form", FORMS)
def test_gradients_equal_definition(layer: Attention, form: str) -> None:
    length = 65
    x = inputs(length).requires_grad_()
    weight = inputs(length, seed=7)
    y = {
        "parallel": lambda: layer.parallel(x),
        "chunks": lambda: run(layer, x, [20, 45])[0],
        "steps": lambda: steps(layer, x)[0],
    }[form]()
    layer.zero_grad()
    (y * weight).sum().backward()

    x64 = x.detach().double().requires_grad_()
    weights64 = double_weights(layer)
    for name, _ in layer.named_parameters():
        weights64[name].requires_grad_()
    wanted = ORACLES[layer.config.attention](layer, weights64, x64)[0]
    (wanted * weight.double()).sum().backward()

    assert x.grad is not None
    assert x64.grad is not None
    # The state of vq has codes, which carry no gradient to the keys of an earlier call.
    keys_apart = layer.config.attention == "vq" and form != "parallel"
    if not keys_apart:
        assert_close(x.grad, x64.grad, GRADIENT_TOLERANCE)
    for name, parameter in layer.named_parameters():
        found, expected = parameter.grad, weights64[name].grad
        assert found is not None, name
        assert expected is not None, name
        if keys_apart and name in ("qkv.weight", "conv_weight"):
            q_and_v = [0, 2]
            found, expected = (t.unflatten(0, (3, -1))[q_and_v] for t in (found, expected))
        assert_close(found, expected, GRADIENT_TOLERANCE)


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
    assert_states_close({name: tensor[1:] for name, tensor in state.items()}, alone_state)


@pytest.mark.parametrize("layer", CONSTANT, ids=case_id, indirect=True)
def test_rows_may_be_at_different_positions(layer: Attention) -> None:
    """One chunk and one step for two sessions of which one has seen more."""
    x, starts, length = inputs(100), (20, 53), 46
    parts, states = [], []
    for row, start in enumerate(starts):
        parts.append(x[row : row + 1, start : start + length + 1])
        states.append(run(layer, x[row : row + 1, :start], [start])[1])
    state = {name: torch.cat([s[name] for s in states]) for name in states[0]}
    together, position = torch.cat(parts), torch.tensor(starts)
    y, state = layer.chunk(together[:, :length], state, position)
    last, _ = layer.step(together[:, length], state, position + length)
    wanted, _ = oracle(layer, x)
    for row, start in enumerate(starts):
        assert_close(y[row], wanted[row, start : start + length])
        assert_close(last[row], wanted[row, start + length])


@pytest.mark.slow
def test_future_never_changes_the_past(layer: Attention) -> None:
    """Not even in rounding, however large the future is."""
    start, x = 30, inputs(130)
    _, state = run(layer, x[:, :start], [start])
    x = x[:, start:]
    forms: list[Callable[[Tensor], Tensor]] = [
        layer.parallel,
        lambda x: run(layer, x, [100])[0],
        lambda x: run(layer, x, [100], state, start)[0],
    ]
    for form, at in itertools.product(forms, [1, 20, 50, 63, 64, 90]):
        changed = x.clone()
        changed[:, at] = 1e4
        assert torch.equal(form(x)[:, :at], form(changed)[:, :at]), at


@pytest.mark.slow
@layers_with("extreme", EXTREMES)
def test_extreme_inputs_stay_finite(layer: Attention, extreme: tuple[float, int]) -> None:
    """Outputs, states and gradients."""
    x = with_extreme(*extreme).requires_grad_()
    y, state = run(layer, x, [65, 5])
    stepped, stepped_state = steps(layer, x[:, :30])
    for tensor in (y, stepped, *state.values(), *stepped_state.values()):
        assert tensor.isfinite().all()
    layer.parallel(x).sum().backward()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


def test_small_inputs_equal_definition(layer: Attention) -> None:
    """Here the small constants under roots and in denominators show."""
    x = inputs(65) / 1000
    wanted, wanted_state = oracle(layer, x)
    y, state = run(layer, x, [40, 25])
    assert_close(y, wanted)
    assert_states_close(state, wanted_state)


@pytest.mark.parametrize("layer", [("elu", {})], indirect=True, ids=case_id)
def test_faint_features_equal_definition(layer: Attention) -> None:
    """The elu of a very negative number leaves a denominator as small as its epsilon."""
    with torch.no_grad():
        layer.get_parameter("qkv.weight").abs_().neg_()
    x = inputs(65).abs()
    wanted, _ = oracle(layer, x)
    assert_close(layer.parallel(x), wanted)
    assert_close(steps(layer, x)[0], wanted)


@pytest.mark.parametrize("layer", [("relu", {}), ("cosformer", {})], indirect=True, ids=case_id)
def test_query_without_a_feature_reads_zero(layer: Attention) -> None:
    x = inputs(70)
    x[:, 40] = 0.0
    with torch.no_grad():
        for y in (layer.parallel(x), steps(layer, x)[0]):
            assert torch.equal(y[:, 40], torch.zeros(2, 24))


@pytest.mark.parametrize("case", DEFAULTS, ids=case_id)
def test_biases_equal_definition(case: Case) -> None:
    layer = make_layer(*case, attention_bias=True)
    x = inputs(65)
    wanted, wanted_state = oracle(layer, x)
    y, state = run(layer, x, [40, 25])
    assert {"qkv.bias", "out.bias"} <= dict(layer.named_parameters()).keys()
    assert_close(y, wanted)
    assert_states_close(state, wanted_state)


@pytest.mark.parametrize(
    ("layer", "bias", "strength"),
    [
        (("gated", {}), "decay_up.bias", -60.0),
        (("delta", {}), "decay.bias", 25.0),
        (("delta", {"channel_decay": True}), "decay_up.bias", 25.0),
    ],
    indirect=["layer"],
    ids=["gated", "delta", "delta-channel_decay"],
)
def test_fast_decay_equals_definition(layer: Attention, bias: str, strength: float) -> None:
    """Decays so fast that float32 cannot hold their product over a block, nor its inverse."""
    with torch.no_grad():
        parameter = layer.get_parameter(bias)
        parameter.copy_(torch.linspace(0.0, strength, len(parameter)))
    test_any_chunking_equals_definition(layer, 0)
    test_gradients_equal_definition(layer, "parallel")


def test_arguments_are_not_changed(layer: Attention) -> None:
    _, state = run(layer, inputs(10), [10])
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    layer.chunk(inputs(70), state, positions(10))
    layer.step(inputs(1)[:, 0], state, positions(10))
    for name, tensor in before.items():
        assert torch.equal(state[name], tensor)


def test_state_has_the_promised_shape_and_type(layer: Attention) -> None:
    spec = layer.spec.state_spec(layer.config)
    if not layer.spec.constant_state:
        _, cache = run(layer, inputs(70), [70])
        assert {name: cache.pop(name).shape[2] for name in ("k", "v")} == {"k": 70, "v": 70}
        assert {n: t.shape[1:] for n, t in cache.items()} == {n: spec[n].shape for n in cache}
        return
    low = inputs(70).bfloat16()
    _, state = copy.deepcopy(layer).bfloat16().chunk(low, layer.empty_state(2, CPU), positions(0))
    _, stepped = copy.deepcopy(layer).bfloat16().step(low[:, 0], state, positions(70))
    for after in (state, stepped):
        assert after.keys() == spec.keys()
        for name, tensor in after.items():
            assert tensor.shape == (2, *spec[name].shape)
            assert tensor.dtype == DTYPES[spec[name].dtype]
            assert tensor.dtype in (torch.float32, torch.float64, torch.int64)


def test_zeros_are_the_empty_state(layer: Attention) -> None:
    x = inputs(30)
    assert all(not tensor.any() for tensor in layer.empty_state(2, CPU).values())
    assert_close(run(layer, x, [30])[0], layer.parallel(x).double())


CPU = torch.device("cpu")


def inputs(length: int, seed: int = 3) -> Tensor:
    return torch.randn(2, length, 24, generator=torch.Generator().manual_seed(seed))


def with_extreme(value: float, count: int) -> Tensor:
    """`inputs` of which so many tokens in a row are of one value."""
    x = inputs(70)
    x[:, min(20, 70 - count) :][:, :count] = value
    return x


def positions(start: int) -> Tensor:
    return torch.full((2,), start, dtype=torch.int64)


def oracle(layer: Attention, x: Tensor) -> tuple[Tensor, State]:
    return ORACLES[layer.config.attention](layer, double_weights(layer), x.double())


def double_weights(layer: Attention) -> dict[str, Tensor]:
    """Parameters and buffers in float64, apart from the layer."""
    named = itertools.chain(layer.named_parameters(), layer.named_buffers())
    return {name: tensor.detach().double() for name, tensor in named}


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
        assert actual[name].shape == tensor.shape, name
        if not tensor.is_floating_point():
            assert torch.equal(actual[name], tensor), name
        elif tensor.numel():
            assert_close(actual[name], tensor.double())
