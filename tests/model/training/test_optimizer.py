from __future__ import annotations

import pytest
import torch
from torch import nn

from model.config import ModelConfig
from model.lm import LanguageModel
from model.ops.layers import FusedLinear
from model.training.optimizer import (
    SplitMuon,
    StackedMuon,
    learning_rate_factor,
    make_optimizers,
    prepare_step,
)


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert [learning_rate_factor(step, 100, 4) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1]


def test_decay_is_linear_and_ends_at_zero() -> None:
    assert learning_rate_factor(52, 100, 4) == pytest.approx(0.5)
    assert learning_rate_factor(99, 100, 4) == pytest.approx(1 / 96)
    assert learning_rate_factor(100, 100, 4) == 0.0


def test_rate_stays_at_its_peak_until_the_decay_begins() -> None:
    factors = [learning_rate_factor(step, 100, 4, decay_steps=20) for step in (4, 79, 80, 90)]
    assert factors == [1.0, 1.0, 1.0, 0.5]
    assert learning_rate_factor(99, 100, 4, decay_steps=0) == 1.0


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate_factor(0, 10, 0) == 1.0


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("attention", ["gated", "elu", "softmax"])
def test_every_weight_is_updated_and_only_matrices_decay(kind: str, attention: str) -> None:
    config = ModelConfig(300, 16, 1, 2, 8, 24, attention=attention)
    model = LanguageModel(config)
    model.init_weights(torch.Generator().manual_seed(0))
    optimizers = make_optimizers(model, kind, 1e-3, 0.1)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in model.named_parameters():
        decays = parameter.dim() == 2 and "embedding" not in name and "conv" not in name
        wanted = before[name] * (1 - 1e-4) if decays else before[name]
        torch.testing.assert_close(parameter, wanted, rtol=1e-6, atol=0, msg=name)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert (parameter != before[name]).any(), name


def test_each_block_has_a_muon_and_the_rest_adamw() -> None:
    model = LanguageModel(ModelConfig(300, 16, 3, 2, 8, 24))
    *muons, adamw = make_optimizers(model, "muon", 1e-3, 0.1, embedding_learning_rate=3e-3)
    assert [type(muon) for muon in muons] == [SplitMuon] * 3
    for muon, block in zip(muons, model.blocks, strict=True):
        assert isinstance(muon, SplitMuon)
        inside = {id(parameter) for parameter in block.parameters()}
        assert all(id(weight) in inside for weight in muon.weights)
    assert any(p is model.embedding.weight for g in adamw.param_groups for p in g["params"])
    prepare_step([*muons, adamw], 0.5)
    assert [g["lr"] for o in (*muons, adamw) for g in o.param_groups] == [5e-4] * 3 + [1.5e-3]


def test_muon_orthogonalises_each_matrix_of_a_fused_weight() -> None:
    torch.manual_seed(0)
    together = nn.Sequential(FusedLinear(16, (16, 16)))
    apart = [nn.Linear(16, 16, bias=False) for _ in range(2)]
    gradient = torch.randn(32, 16)
    gradient[:16] *= 100  # a joint update would leave the other half next to nothing
    for half, linear in zip(together[0].weight.detach().chunk(2), apart, strict=True):
        linear.weight.data.copy_(half)
    together[0].weight.grad = gradient.clone()
    for half, linear in zip(gradient.chunk(2), apart, strict=True):
        linear.weight.grad = half.clone()
    options = {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    SplitMuon([(together[0].weight, (16, 16))], **options).step()
    torch.optim.Muon([linear.weight for linear in apart], **options).step()
    assert torch.equal(together[0].weight, torch.cat([linear.weight for linear in apart]))


def test_unknown_optimizer_is_refused() -> None:
    model = LanguageModel(ModelConfig(300, 16, 1, 2, 8, 24))
    with pytest.raises(ValueError, match="'sgd'"):
        make_optimizers(model, "sgd", 1e-3, 0.1)


def test_matrices_that_are_stacked_move_as_those_alone() -> None:
    """`StackedMuon` is torch's Muon; products of bfloat16 round differently in a batch."""

    def model() -> nn.Sequential:
        torch.manual_seed(1)
        linear = [FusedLinear(24, (16, 16)), nn.Linear(24, 40, bias=False), FusedLinear(24, (16,))]
        return nn.Sequential(*linear)

    alone, stacked = model(), model()
    weights = [[(layer.weight, parts) for layer, parts in _layers(m)] for m in (alone, stacked)]
    options = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = SplitMuon(weights[0], **options), StackedMuon(weights[1], **options)
    optimizers[1].param_groups[0]["lr"] = torch.tensor(1e-2)
    for seed in range(3):
        for network in (alone, stacked):
            generator = torch.Generator().manual_seed(seed)
            for parameter in network.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        before = [parameter.clone() for parameter in alone.parameters()]
        for optimizer in optimizers:
            optimizer.step()
        for old, a, b in zip(before, alone.parameters(), stacked.parameters(), strict=True):
            assert (a - b).norm() < 0.02 * (a - old).norm()


def _layers(model: nn.Sequential) -> list[tuple[nn.Linear, tuple[int, ...]]]:
    return [
        (layer, layer.parts if isinstance(layer, FusedLinear) else (layer.out_features,))
        for layer in model
        if isinstance(layer, nn.Linear)
    ]
