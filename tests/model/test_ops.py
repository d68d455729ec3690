from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.ops.recurrence import MIN_LOG_DECAY, recurrence_chunk, recurrence_step


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("log_decay", [0.0, -1e-4, -0.5, MIN_LOG_DECAY])
def test_chunk_equals_steps_at_every_strength_of_decay(log_decay: float) -> None:
    q, k, v = (random(1, 200, 2, 8, seed=i) for i in range(3))
    decay = torch.full_like(q, log_decay)
    num, state = recurrence_chunk(q, k, v, torch.zeros(1, 2, 8, 8), decay)
    stepped = torch.zeros(1, 2, 8, 8)
    for t in range(200):
        o, stepped = recurrence_step(q[:, t], k[:, t], v[:, t], stepped, decay[:, t].exp())
        torch.testing.assert_close(num[:, t], o, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, stepped, rtol=1e-4, atol=1e-4)


def test_strongest_decay_gives_finite_gradients() -> None:
    q, k, v = (random(1, 128, 1, 4, seed=i).requires_grad_() for i in range(3))
    decay = torch.full((1, 128, 1, 4), MIN_LOG_DECAY, requires_grad=True)
    recurrence_chunk(q, k, v, torch.zeros(1, 1, 4, 4), decay)[0].sum().backward()
    for tensor in (q, k, v, decay):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


def test_state_stays_float32_under_autocast() -> None:
    q, k, v = (random(1, 70, 1, 4, seed=i) for i in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        num, state = recurrence_chunk(q, k, v, torch.zeros(1, 1, 4, 4))
    assert num.dtype == state.dtype == torch.float32
    assert torch.equal(num, recurrence_chunk(q, k, v, torch.zeros(1, 1, 4, 4))[0])
