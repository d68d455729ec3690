from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from model.convert.linearize.plan import Plan, window_plan
from model.convert.linearize.source import rotated, sliding_attention
from model.convert.linearize.student import LORA_SCALE, Student, empty_state, near_attention, step
from model.families.llama.config import LayerPlan
from tests.model.convert.linearize.tiny import PLAN, SHAPE, tiny_ids, tiny_llama


def random_student(ranks: dict[str, int] | None = None, plan: Plan = PLAN) -> Student:
    """One whose every parameter is away from its start."""
    student = Student(tiny_llama(), plan, ranks or {})
    generator = torch.Generator().manual_seed(1)
    student.init_weights(generator)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return student


def projections(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)

    def draw(heads: int) -> Tensor:
        return torch.randn(2, heads, num_tokens, SHAPE.head_dim, generator=generator)

    return draw(SHAPE.num_heads), draw(SHAPE.num_kv_heads), draw(SHAPE.num_kv_heads)


def near_weights(q: Tensor, k: Tensor, window: int, sinks: int) -> Tensor:
    """The definition of the near part: softmax over all pairs that it sees, [B, H, T, T]."""
    place = torch.arange(q.shape[2])
    distance = place[:, None] - place
    seen = (distance >= 0) & ((distance < window) | (place < sinks))
    k = k.repeat_interleave(SHAPE.group, 1)
    return (q @ k.mT / math.sqrt(SHAPE.head_dim)).masked_fill(~seen, -math.inf).softmax(-1)


def far_pairs(num_tokens: int, window: int, sinks: int) -> Tensor:
    place = torch.arange(num_tokens)
    return ((place[:, None] - place >= window) & (place >= sinks)).float()


@pytest.mark.parametrize("window", [1, 5, 6, 64, 300])
@pytest.mark.parametrize("num_tokens", [1, 6, 70, 131])
def test_near_part_is_softmax_over_window_and_first_tokens(window: int, num_tokens: int) -> None:
    q, k, v = projections(num_tokens)
    wanted = near_weights(q, k, window, 2) @ v.repeat_interleave(SHAPE.group, 1)
    torch.testing.assert_close(near_attention(q, k, v, window, 2), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 5, 64, 130, 300])
@pytest.mark.parametrize("num_tokens", [1, 70, 131, 400])
def test_sliding_attention_is_the_near_part(window: int, num_tokens: int) -> None:
    (q, k, v), farthest = projections(num_tokens), window + 2
    to_sinks = torch.cat([q[:, :, :farthest], 2.0 - q[:, :, farthest:]], dim=2)
    found = sliding_attention(q, to_sinks, k, v, window, 2)
    wanted = near_attention(q, k, v, window, 2, to_sinks)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [9, 75, 200])
def test_relative_far_part_is_the_quadratic_form(num_tokens: int) -> None:
    student = random_student()
    window, sinks, far = PLAN.layers[0].window, PLAN.sinks, student.layer(0).far
    q, k, v = projections(num_tokens)

    def features(x: Tensor, weight: Tensor) -> Tensor:
        x = x @ weight
        return torch.cat([x, -x], -1).exp() / (x.exp() + (-x).exp()).sum(-1, keepdim=True)

    weight = (torch.einsum("bhtk,hk->bht", q, far.scale) / math.sqrt(SHAPE.head_dim)) + far.bias[
        :, None
    ]
    keys = features(k, far.key_map).repeat_interleave(SHAPE.group, 1)
    pairs = features(q, far.query_map) @ keys.mT * weight.exp().unsqueeze(-1)
    pairs = pairs * far_pairs(num_tokens, window, sinks)
    values = v.repeat_interleave(SHAPE.group, 1)
    near = near_weights(*rotated(q, k, SHAPE), window, sinks) @ values
    wanted = (near + pairs @ values) / (1 + pairs.sum(-1, keepdim=True))
    torch.testing.assert_close(student.attention(0, q, k, v), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [14, 15, 90])
def test_delta_far_part_is_the_recurrence(num_tokens: int) -> None:
    student = random_student()
    window, sinks, far = PLAN.layers[1].window, PLAN.sinks, student.layer(1).far
    q, k, v = projections(num_tokens)
    gates = torch.cat([k, v], -1) / math.sqrt(SHAPE.head_dim) @ far.gates
    beta, keep = (gates + far.gate_bias[:, None]).sigmoid().unbind(-1)
    state = torch.zeros(2, SHAPE.num_heads, PLAN.layers[1].features, SHAPE.head_dim)
    near = near_weights(*rotated(q, k, SHAPE), window, sinks) @ v.repeat_interleave(SHAPE.group, 1)
    found = student.attention(1, q, k, v)
    for token in range(num_tokens):
        wanted = near[:, :, token]
        if (old := token - window) >= sinks:
            group = [i // SHAPE.group for i in range(SHAPE.num_heads)]
            key = far.features(k, far.key_map)[:, group, old, :, None]
            b, a = (gate[:, group, old, None, None] for gate in (beta, keep))
            value = v[:, group, old, None, :]
            state = a * state
            state = state + b * key @ (value - key.mT @ state)
            read = far.features(q, far.query_map)[:, :, token, None, :] @ state
            along = (q[:, :, token] * far.scale).sum(-1) / math.sqrt(SHAPE.head_dim)
            weight = (along + far.bias).exp().unsqueeze(-1)
            wanted = (wanted + weight * read[:, :, 0]) / (1 + weight)
        torch.testing.assert_close(found[:, :, token], wanted, rtol=1e-4, atol=1e-5)


def test_windows_as_long_as_the_text_give_the_source() -> None:
    ids = tiny_ids(40)
    plan = Plan((LayerPlan(40, "relative", 4), LayerPlan(39, "delta", 4), LayerPlan(38)), sinks=2)
    student = random_student(plan=plan)
    torch.testing.assert_close(student.hidden(ids), student.source.hidden(ids))


def test_source_with_a_past_sees_what_a_window_and_first_tokens_hold() -> None:
    ids, source = tiny_ids(90), tiny_llama()
    windows = Student(source, window_plan(SHAPE.num_layers, 28), {}, farthest=32)
    found = source.hidden(ids, 32)
    torch.testing.assert_close(found, windows.hidden(ids), rtol=1e-3, atol=1e-4)
    assert torch.equal(source.hidden(ids[:, :32], 32), source.hidden(ids[:, :32]))
    assert (found - source.hidden(ids)).abs().max() > 0.01


def test_what_is_computed_again_has_the_same_gradients() -> None:
    ids, student = tiny_ids(60), random_student()
    gradients = []
    for recompute in (False, True):
        student.zero_grad()
        student.hidden(ids, recompute=recompute).square().sum().backward()
        gradients.append([parameter.grad for parameter in student.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_far_parts_and_a_shorter_window_change_what_is_computed() -> None:
    ids, student = tiny_ids(60), random_student()
    found = student.hidden(ids)
    assert (student.hidden(ids, max_ring=4) - found).abs().max() > 0.01
    student.with_far = False
    assert (student.hidden(ids) - found).abs().max() > 0.01


def test_merged_updates_are_the_adapters_forward() -> None:
    ids = tiny_ids(60)
    student = random_student({"qkv": 3, "out": 2, "up": 2, "down": 2})
    merged = Student(student.merged_source(), PLAN, {})
    assert merged.load_state_dict(student.state_dict(), strict=False).missing_keys == []
    found, wanted = merged.hidden(ids), student.hidden(ids)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    update = student.layer(0).updates["out"]
    torch.testing.assert_close(update.delta(), LORA_SCALE * update.b @ update.a)
    bare = Student(student.source, PLAN, {})
    bare.load_state_dict(student.state_dict(), strict=False)
    assert (bare.hidden(ids) - wanted).abs().max() > 0.01


@pytest.mark.parametrize("farthest", [0, 16])
def test_step_form_is_the_parallel_form(farthest: int) -> None:
    ids, student = tiny_ids(45, rows=3), random_student({"qkv": 3, "up": 2})
    student.farthest = farthest
    wanted = student.hidden(ids)
    state = empty_state(student, 3, torch.float32)
    for token in range(ids.shape[1]):
        found = step(student, state, ids[:, token])
        torch.testing.assert_close(found, wanted[:, token], rtol=1e-3, atol=1e-4)


def test_rows_of_a_step_are_at_positions_of_their_own() -> None:
    ids, student = tiny_ids(45, rows=2), random_student()
    wanted = student.hidden(ids)
    state = empty_state(student, 2, torch.float32)
    for token in range(20):
        step(student, state, ids[:, token])
    later = empty_state(student, 2, torch.float32)
    for layer, other in zip(state.layers, later.layers, strict=True):
        for name in ("keys", "values", "far"):
            if getattr(layer, name) is not None:
                getattr(layer, name)[1] = getattr(other, name)[1]
    state.positions[1] = 0
    for token in range(25):
        found = step(student, state, torch.stack([ids[0, 20 + token], ids[1, token]]))
        torch.testing.assert_close(found[0], wanted[0, 20 + token], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found[1], wanted[1, token], rtol=1e-3, atol=1e-4)


def test_state_has_the_bytes_of_its_plan() -> None:
    student = random_student()
    assert empty_state(student, 2).num_bytes == PLAN.state_bytes(SHAPE)
