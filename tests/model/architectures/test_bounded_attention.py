"""Attention over a bounded past equals a loop over lists, far beyond two turns of the ring."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from model.architectures.decoder import BoundedAttention
from model.architectures.hybrid import SINKS, past_state
from model.architectures.network import State
from tests.model.attention.test_contract import assert_close, random_split

WIDTH, HEADS, KV_HEADS, HEAD_DIM, ROTARY, CONTEXT = 12, 4, 2, 6, 4, 32
LENGTH = 150


@pytest.fixture(params=[False, True], ids=["plain", "gated"])
def gated(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@cache
def mixer(gated: bool, context: int = CONTEXT) -> BoundedAttention:
    made = BoundedAttention(
        WIDTH,
        HEADS,
        KV_HEADS,
        HEAD_DIM,
        rotary_dim=ROTARY,
        rope_theta=100.0,
        eps=1e-5,
        gated=gated,
        context=context,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return made.requires_grad_(False)


def inputs() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def loop(weights: dict[str, Tensor], x: Tensor, gated: bool, context: int) -> Tensor:
    """[T, D] to [T, D] in float64, with a list of turned keys and of values that are kept."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    kept: list[tuple[Tensor, Tensor]] = []
    outputs = []
    for position, row in enumerate(x.double()):
        q = (w["q.weight"] @ row).view(HEADS, -1)
        q, gate = q[:, :HEAD_DIM], q[:, HEAD_DIM:]
        q = normed(q, w["q_norm.weight"])
        k = normed((w["k.weight"] @ row).view(KV_HEADS, -1), w["k_norm.weight"])
        kept.append((rotated(k, position), (w["v.weight"] @ row).view(KV_HEADS, -1)))
        if len(kept) > context:
            del kept[SINKS]
        to_sink, to_other = rotated(q, min(position, context - 1)), rotated(q, position)
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = []
            for i, (key, _) in enumerate(kept):
                turned = to_sink if i < SINKS else to_other
                scores.append(turned[head] @ key[group] / math.sqrt(HEAD_DIM))
            shares = torch.stack(scores).softmax(dim=0)
            heads.append(shares @ torch.stack([value[group] for _, value in kept]))
        y = torch.stack(heads)
        y = y * torch.sigmoid(gate) if gated else y
        outputs.append(w["out.weight"] @ y.flatten())
    return torch.stack(outputs)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """Each row of [H, D]."""
    y, half = x.clone(), ROTARY // 2
    for i in range(half):
        angle = position * 100.0 ** (-i / half)
        first, second = x[:, i], x[:, i + half]
        y[:, i] = first * math.cos(angle) - second * math.sin(angle)
        y[:, i + half] = first * math.sin(angle) + second * math.cos(angle)
    return y


@cache
def wanted(gated: bool, context: int = CONTEXT) -> Tensor:
    weights = mixer(gated).state_dict()
    return torch.stack([loop(weights, row, gated, context) for row in inputs()])


def empty(context: int = CONTEXT) -> State:
    specs = past_state(context, KV_HEADS, HEAD_DIM)
    return {name: torch.zeros(2, *spec.shape) for name, spec in specs.items()}


def run(made: BoundedAttention, x: Tensor, sizes: list[int]) -> tuple[Tensor, State]:
    state, outputs, seen = empty(made.context), [], 0
    for part in x.split(sizes, dim=1):
        y, state = made(part, state, torch.full((2,), seen))
        outputs.append(y)
        seen += part.shape[1]
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize(
    "sizes",
    [[1] * LENGTH, [LENGTH], [31, 1, 1, 117], [32, 28, 28, 28, 34], [5, 64, 81], [97, 53]],
    ids=lambda sizes: f"{len(sizes)}-parts",
)
def test_ring_equals_the_loop(gated: bool, sizes: list[int]) -> None:
    outputs, _ = run(mixer(gated), inputs(), sizes)
    assert_close(outputs, wanted(gated), 1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_any_split_ends_in_the_same_state(gated: bool, seed: int) -> None:
    outputs, state = run(mixer(gated), inputs(), random_split(LENGTH, seed))
    assert_close(outputs, wanted(gated), 1e-4)
    _, stepped = run(mixer(gated), inputs(), [1] * LENGTH)
    for name, tensor in stepped.items():
        assert_close(state[name], tensor.double(), 1e-4)


def test_text_that_fits_is_plain_attention(gated: bool) -> None:
    """With a bound that the text does not come to, nothing depends on the bound."""
    outputs, _ = run(mixer(gated, 160), inputs(), [50, 100])
    assert_close(outputs, wanted(gated, 160), 1e-4)
    short, _ = run(mixer(gated), inputs()[:, :CONTEXT], [20, 12])
    assert_close(short, wanted(gated, 160)[:, :CONTEXT], 1e-4)


def test_rows_may_be_at_other_positions(gated: bool) -> None:
    """One before the bound, the other beyond it."""
    made, x = mixer(gated), inputs()
    _, early = run(made, x[:, :9], [9])
    _, late = run(made, x[:, :100], [100])
    state = {name: torch.stack([early[name][0], late[name][1]]) for name in early}
    new = torch.stack([x[0, 9:49], x[1, 100:140]])
    y, _ = made(new, state, torch.tensor([9, 100]))
    assert_close(y[0], wanted(gated)[0, 9:49], 1e-4)
    assert_close(y[1], wanted(gated)[1, 100:140], 1e-4)


def test_place_of_each_position_is_that_of_the_ring() -> None:
    """The first `SINKS` stay, the others take turns."""
    made, x = mixer(False), inputs()
    _, state = run(made, x, [LENGTH])
    values = state["v"].transpose(2, 3).flatten(1, 2)
    for position in [*range(SINKS), *range(LENGTH - CONTEXT + SINKS, LENGTH)]:
        place = position
        if position >= SINKS:
            place = SINKS + (position - SINKS) % (CONTEXT - SINKS)
        v = (x[:, position] @ made.v.weight.T).unflatten(-1, (KV_HEADS, -1))
        assert_close(values[:, place], v.double(), 1e-5)
