"""The native runtime keeps the contract of every mechanism: the reference's own tests, re-run.

Gradients are left out, since the runtime has none, and so is the growing cache
of softmax attention, which it refuses.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model.attention.base import Attention
from model.config import ModelConfig
from model.native.options import WITHOUT_KERNELS as NOT_COVERED
from model.native.options import covers
from model.native.runtime import NativeError, levels
from tests.model.attention import test_contract as contract
from tests.model.attention.test_contract import (
    CONSTANT,
    EXTREMES,
    Case,
    assert_close,
    assert_states_close,
    at_lengths,
    case_id,
    inputs,
    layers_with,
    make_layer,
    oracle,
    run,
    steps,
    with_extreme,
)
from tests.model.ops.cpu.native_attention import NativeAttention
from tests.model.representatives import chosen


def has_kernels(case: Case) -> bool:
    return covers(ModelConfig(257, attention=case[0], attention_options=case[1]))


WITHOUT_KERNELS = [case for case in CONSTANT if not has_kernels(case)]
COVERED = [case for case in CONSTANT if has_kernels(case)]
DEFAULTS = [case for case in COVERED if not case[1]]
#: Shapes that are no multiple of a vector, or of several; one head, and three.
SHAPES: list[dict[str, object]] = [
    {"head_dim": 2, "num_attention_heads": 1},
    {"head_dim": 16, "num_attention_heads": 3},
    {"head_dim": 20, "num_attention_heads": 1},
    {"head_dim": 64, "num_attention_heads": 3},
]
#: Options that the contract's variants lack.
MORE: list[Case] = [
    ("cosformer", {"horizon": 6}),
    ("delta", {"conv_size": 2}),
    ("delta", {"key_dim": 20, "negative_eigenvalues": True}),
    ("delta", {"key_dim": 3, "gate": False, "decay": False}),
    ("gated", {"decay_rank": 3}),
    ("gated", {"key_dim": 20}),
    ("normed", {"key_dim": 20}),
    ("performer", {"features": 40, "map": "simplified"}),
    ("performer", {"features": 40}),
    ("rbf", {"features": 40}),
    ("retnet", {"key_dim": 20, "positions": "rotary"}),
    ("retnet", {"key_dim": 5, "positions": "none"}),
    ("soft_vq", {"codewords": 40, "beta": 0.25}),
    ("vq", {"window": 300}),
    ("window_linear", {"window": 300}),
    ("window_linear", {"window": 40, "features": 40}),
]


@pytest.fixture(params=COVERED, ids=case_id)
def layer(request: pytest.FixtureRequest) -> NativeAttention:
    return NativeAttention(make_layer(*request.param))


@at_lengths(COVERED)
@pytest.mark.parametrize(
    "check", [contract.test_one_chunk_equals_definition, contract.test_steps_equal_definition]
)
def test_forms_equal_definition(
    layer: Attention, check: Callable[[Attention, int], None], length: int
) -> None:
    check(layer, length)


def test_any_chunking_equals_definition(layer: Attention) -> None:
    contract.test_any_chunking_equals_definition(layer, 3)


@pytest.mark.slow
@pytest.mark.parametrize("layer", DEFAULTS, ids=case_id, indirect=True)
@pytest.mark.parametrize(
    "check",
    [
        contract.test_chunks_and_steps_mix,
        contract.test_rows_do_not_mix,
        contract.test_rows_may_be_at_different_positions,
        contract.test_future_never_changes_the_past,
        contract.test_small_inputs_equal_definition,
        contract.test_arguments_are_not_changed,
        contract.test_zeros_are_the_empty_state,
    ],
)
def test_the_rest_of_the_contract_holds(
    layer: Attention, check: Callable[[Attention], None]
) -> None:
    check(layer)


@pytest.mark.slow
@layers_with("extreme", EXTREMES, COVERED)
def test_extreme_inputs_stay_finite(layer: Attention, extreme: tuple[float, int]) -> None:
    y, state = run(layer, with_extreme(*extreme), [65, 5])
    for tensor in (y, *state.values()):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("layer", [("elu", {})], indirect=True, ids=case_id)
def test_faint_features_equal_definition(layer: Attention) -> None:
    contract.test_faint_features_equal_definition(layer)


@pytest.mark.parametrize("layer", [("relu", {}), ("cosformer", {})], indirect=True, ids=case_id)
def test_query_without_a_feature_reads_zero(layer: Attention) -> None:
    contract.test_query_without_a_feature_reads_zero(layer)


@pytest.mark.parametrize(
    ("layer", "bias", "strength"),
    [(("gated", {}), "decay_up.bias", -60.0), (("delta", {}), "decay.bias", 25.0)],
    indirect=["layer"],
    ids=["gated", "delta"],
)
def test_fast_decay_equals_definition(layer: Attention, bias: str, strength: float) -> None:
    with torch.no_grad():
        parameter = layer.get_parameter(bias)
        parameter.copy_(torch.linspace(0.0, strength, len(parameter)))
    contract.test_any_chunking_equals_definition(layer, 0)


@pytest.mark.parametrize("case", DEFAULTS, ids=case_id)
def test_biases_equal_definition(case: Case) -> None:
    assert_equals_definition(NativeAttention(make_layer(*case, attention_bias=True)))


@pytest.mark.parametrize("case", MORE, ids=case_id)
def test_more_options_equal_definition(case: Case) -> None:
    assert_equals_definition(NativeAttention(make_layer(*case)))


@pytest.mark.parametrize(("case", "shape"), chosen(DEFAULTS, SHAPES))
def test_shapes_equal_definition(case: Case, shape: dict[str, object]) -> None:
    assert_equals_definition(NativeAttention(make_layer(*case, **shape)))


@pytest.mark.parametrize(("case", "level"), chosen(DEFAULTS, levels()))
def test_every_level_equals_definition(case: Case, level: str) -> None:
    assert_equals_definition(NativeAttention(make_layer(*case), level))


def assert_equals_definition(layer: Attention) -> None:
    x = inputs(65)
    wanted, wanted_state = oracle(layer, x)
    y, state = run(layer, x, [65])
    assert_close(y, wanted)
    assert_states_close(state, wanted_state)
    assert_close(steps(layer, x[:, :3])[0], wanted[:, :3])


def test_every_option_without_kernels_is_among_the_cases() -> None:
    found = {(name, option) for name, options in WITHOUT_KERNELS for option in options}
    assert NOT_COVERED.keys() <= found


@pytest.mark.parametrize("case", WITHOUT_KERNELS, ids=case_id)
def test_option_without_kernels_is_refused(case: Case) -> None:
    layer = NativeAttention(make_layer(*case))
    with pytest.raises(NativeError, match=f"no kernels for {case[0]}"):
        steps(layer, inputs(3))
