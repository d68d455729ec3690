from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from model.training.passes import LOSS_ROWS, linear_cross_entropy


@pytest.mark.parametrize("rows", [1, LOSS_ROWS - 1, LOSS_ROWS, LOSS_ROWS + 1])
def test_loss_and_gradients_equal_plain_cross_entropy(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 8, generator=generator, requires_grad=True)
    weight = torch.randn(50, 8, generator=generator, requires_grad=True)
    targets = torch.randint(50, (rows,), generator=generator)

    plain = F.cross_entropy(x.double() @ weight.double().t(), targets)
    expected = torch.autograd.grad(3.0 * plain, (x, weight))
    for dtype in (torch.float32, torch.float64):  # a kernel, where it is built, and torch
        loss = linear_cross_entropy(x, weight, targets, dtype)
        actual = torch.autograd.grad(3.0 * loss, (x, weight))

        assert loss.item() == pytest.approx(plain.item(), abs=1e-5)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_bfloat16_products_round_no_more_than_their_operands_and_results() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LOSS_ROWS + 1, 8, generator=generator, requires_grad=True)
    weight = torch.randn(50, 8, generator=generator, requires_grad=True)
    targets = torch.randint(50, (LOSS_ROWS + 1,), generator=generator)
    exact = linear_cross_entropy(x, weight, targets)
    low = linear_cross_entropy(x, weight, targets, torch.bfloat16)
    assert low.item() == pytest.approx(exact.item(), rel=2**-9)
    pairs = (torch.autograd.grad(loss, (x, weight)) for loss in (low, exact))
    for a, b in zip(*pairs, strict=True):
        assert (a - b).norm() < 4 * 2**-9 * b.norm()


def test_large_logits_stay_finite() -> None:
    x, weight = torch.full((2, 4), 1e4), torch.eye(4)
    assert linear_cross_entropy(x, weight, torch.tensor([0, 1])).item() == pytest.approx(1.3862944)
