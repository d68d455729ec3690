from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.ops.delta import delta_chunk, delta_step
from model.ops.recurrence import MIN_LOG_DECAY, decayed, recurrence_chunk, recurrence_step


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


STRENGTHS = [
    (0.0, True),
    (-1e-4, True),
    (-0.5, True),
    (MIN_LOG_DECAY, True),
    (0.0, False),
    (-0.5, False),
    (MIN_LOG_DECAY, False),
    (-100.0, False),
    (-1e4, False),
]


@pytest.mark.parametrize(("log_decay", "bounded"), STRENGTHS)
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 200])
def test_chunk_equals_steps_at_every_strength_of_decay(
    log_decay: float, bounded: bool, num_tokens: int
) -> None:
    q, k, v = (random(1, num_tokens, 2, 8, seed=i) for i in range(3))
    decay = log_decay * torch.rand(q.shape, generator=torch.Generator().manual_seed(3))
    num, state = recurrence_chunk(q, k, v, torch.zeros(1, 2, 8, 8), decay, bounded)
    stepped = torch.zeros(1, 2, 8, 8)
    for t in range(num_tokens):
        o, stepped = recurrence_step(q[:, t], k[:, t], v[:, t], stepped, decay[:, t])
        torch.testing.assert_close(num[:, t], o, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, stepped, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("log_decay", "bounded"), STRENGTHS)
def test_gradients_are_those_of_the_quadratic_sum(log_decay: float, bounded: bool) -> None:
    q, k, v = (random(1, 64, 1, 4, seed=i).double().requires_grad_() for i in range(3))
    decay = random(1, 64, 1, 4, seed=3).double().abs() * log_decay / 4
    decay = decay.clamp_min(MIN_LOG_DECAY if bounded else -1e9).requires_grad_()
    weight = random(1, 64, 1, 4, seed=4).double()
    empty = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    num, _ = recurrence_chunk(q, k, v, empty, decay, bounded)
    actual = torch.autograd.grad((num * weight).sum(), (q, k, v, decay))

    b = decay.cumsum(dim=1)[0, :, 0]
    pairs = (b.unsqueeze(1) - b.unsqueeze(0)).clamp_max(0.0).exp()
    scores = torch.einsum("if,jf,ijf->ij", q[0, :, 0], k[0, :, 0], pairs).tril()
    wanted = torch.autograd.grad(((scores @ v[0, :, 0]) * weight[0, :, 0]).sum(), (q, k, v, decay))
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w, rtol=1e-9, atol=1e-9)


def test_delta_rule_keeps_its_precision_after_a_reset() -> None:
    """One decay that forgets all, among slow ones: what follows it is as precise as before."""
    q, k, v = (random(1, 60, 2, 8, seed=i) for i in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    beta, log_decay = torch.full((1, 60, 2), 0.5), torch.full((1, 60, 2), -1e-3)
    log_decay[:, 20] = -1e4
    num, state = delta_chunk(q, k, v, beta, log_decay, torch.zeros(1, 2, 8, 8))
    stepped = torch.zeros(1, 2, 8, 8)
    for t in range(60):
        inputs = (x[:, t] for x in (q, k, v, beta, log_decay))
        o, stepped = delta_step(*inputs, stepped)
        torch.testing.assert_close(num[:, t], o, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(state, stepped, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("num_tokens", [1, 64, 150])
def test_delta_rule_under_autocast_rounds_the_operands_of_products_alone(num_tokens: int) -> None:
    """Outputs, the state and gradients; a decay or a state in bfloat16 would show in the state."""
    q, k, v = (random(2, num_tokens, 2, 16, seed=i) for i in range(3))
    k, beta = k / k.norm(dim=-1, keepdim=True), random(2, num_tokens, 2, seed=6).sigmoid()
    log_decay, state = torch.full((2, num_tokens, 2), -1e-3), random(2, 2, 16, 16, seed=3)

    def results(low: bool) -> list[Tensor]:
        inputs = [t.clone().requires_grad_() for t in (q, k, v, beta, log_decay, state)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            num, after = delta_chunk(*inputs)
        assert num.dtype == after.dtype == torch.float32
        loss = (num * random(*num.shape, seed=4)).sum() + (
            after * random(*state.shape, seed=5)
        ).sum()
        return [num, after, *torch.autograd.grad(loss, inputs)]

    for low, exact in zip(results(low=True), results(low=False), strict=True):
        assert (low - exact).norm() < 8 * 2**-9 * exact.norm()  # eight roundings to bfloat16


def test_sums_in_float64_take_in_tokens_where_float32_no_longer_does() -> None:
    """After 2^25 tokens of weight one: 64 more, in one chunk and in steps."""
    one = torch.ones(1, 64, 1, 1)
    for dtype, grows in ((torch.float32, False), (torch.float64, True)):
        start = torch.full((1, 1, 1, 1), 2.0**25, dtype=dtype)
        state = start
        for t in range(64):
            _, state = recurrence_step(one[:, t], one[:, t], one[:, t], state)
        assert (state - start == 64).all() == grows
    _, state = recurrence_chunk(one, one, one, start)
    assert (state - start == 64).all()


def test_error_of_a_slow_decay_does_not_grow_with_the_text() -> None:
    """Rounded to float32, a decay near one is wrong in the same direction at each step."""
    log_decay = torch.tensor(-3.3e-5)
    state = start = torch.linspace(1.0, 2.0, 64)
    for _ in range(20_000):
        state = decayed(state, log_decay)
    wanted = start.double() * (20_000 * log_decay.double()).exp()
    assert (state / wanted - 1).abs().max() < 2e-5


def test_state_stays_float32_under_autocast() -> None:
    q, k, v = (random(1, 70, 1, 4, seed=i) for i in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        num, state = recurrence_chunk(q, k, v, torch.zeros(1, 1, 4, 4))
    assert num.dtype == state.dtype == torch.float32
    assert torch.equal(num, recurrence_chunk(q, k, v, torch.zeros(1, 1, 4, 4))[0])
