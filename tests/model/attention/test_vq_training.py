"""What only training does to Transformer-VQ: the codebook moves, dead codes live again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.attention.vq import EMA_DECAY, VqAttention, nearest, update_codebook
from model.config import ModelConfig


@pytest.fixture
def layer() -> VqAttention:
    config = ModelConfig(
        vocab_size=10,
        hidden_size=24,
        num_attention_heads=2,
        head_dim=8,
        attention="vq",
        attention_options={"codewords": 6, "window": 4, "commitment": 0.5},
    )
    layer = VqAttention(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    layer.reset_parameters(generator)
    return layer


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_codebook_moves_in_training_alone(layer: VqAttention) -> None:
    x, before = random(2, 30, 24), layer.codebook.clone()
    layer.eval()
    layer.parallel(x)
    layer.train()
    with torch.no_grad():
        layer.parallel(x)
    assert torch.equal(layer.codebook, before)
    layer.parallel(x, [])
    assert not torch.equal(layer.codebook, before)


def test_gradients_are_of_the_codebook_that_was_read(layer: VqAttention) -> None:
    """Learning moves the codebook after the output is known and before the gradient is taken."""
    x, gradients = random(2, 30, 24), []
    for training in (False, True):
        layer.train(training)
        layer.zero_grad()
        layer.parallel(x).sum().backward()
        gradients.append(
            {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys() == {"qkv.weight", "out.weight", "bias"}
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name])


def test_commitment_is_the_mean_squared_distance_to_the_codewords(layer: VqAttention) -> None:
    x = random(2, 30, 24)
    k = layer.qkv(x).unflatten(-1, (3, 2, 8))[:, :, 1] * 8**-0.25
    distances = (k.unsqueeze(-2) - layer.codebook).square().sum(-1).amin(-1)
    losses: list[Tensor] = []
    layer.parallel(x, losses)
    (loss,) = losses
    torch.testing.assert_close(loss, 0.5 * distances.mean())
    (gradient,) = torch.autograd.grad(loss, layer.qkv.weight)
    assert gradient[16:32].abs().min() > 0  # of k
    assert not gradient[:16].any()
    assert not gradient[32:].any()


def test_codewords_are_moving_averages_of_their_keys() -> None:
    keys, codebook = random(1, 50, 8), random(1, 3, 8, seed=1)
    count, before = torch.full((1, 3), 20.0), codebook.clone()
    codes = nearest(keys.transpose(0, 1), codebook).t()
    update_codebook(codebook, count, keys, codes)
    for y in range(3):
        mine = keys[0, codes[0] == y]
        n = 20.0 * EMA_DECAY + len(mine) * (1 - EMA_DECAY)
        total = before[0, y] * 20.0 * EMA_DECAY + mine.sum(0) * (1 - EMA_DECAY)
        torch.testing.assert_close(count[0, y].item(), n)
        torch.testing.assert_close(codebook[0, y], total / n)


def test_codebook_finds_the_clusters_of_the_keys() -> None:
    """From one good codeword and three that no key is near: revival, then averages."""
    centres = 10 * random(1, 4, 8, seed=2)
    codebook = torch.cat([centres[:, :1], 1e3 + random(1, 3, 8)], dim=1)
    count = torch.ones(1, 4)
    for step in range(700):
        member = torch.randint(4, (200,), generator=torch.Generator().manual_seed(step))
        keys = centres[:, member] + 0.1 * random(1, 200, 8, seed=step)
        update_codebook(codebook, count, keys, nearest(keys.transpose(0, 1), codebook).t())
    nearest_centre = torch.cdist(codebook[0], centres[0]).min(dim=1)
    assert sorted(nearest_centre.indices.tolist()) == [0, 1, 2, 3]
    assert nearest_centre.values.max() < 0.2
