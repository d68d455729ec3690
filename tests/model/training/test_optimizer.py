from __future__ import annotations

import pytest
import torch

from model.config import ModelConfig
from model.lm import LanguageModel
from model.training.optimizer import (
    FINAL_FRACTION,
    learning_rate_factor,
    make_optimizers,
)


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert [learning_rate_factor(step, 100, 4) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1]


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_floor() -> None:
    assert learning_rate_factor(52, 100, 4) == pytest.approx((1 + FINAL_FRACTION) / 2)
    assert learning_rate_factor(100, 100, 4) == pytest.approx(FINAL_FRACTION)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert learning_rate_factor(0, 10, 0) == 1.0


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("attention", ["gated", "elu", "softmax"])
def test_every_weight_is_updated_and_only_matrices_decay(kind: str, attention: str) -> None:
    config = ModelConfig(300, 16, 1, 2, 8, 24, attention=attention)
    model = LanguageModel(config)
    groups = [g for o in make_optimizers(model, kind, 1e-3, 0.1) for g in o.param_groups]
    decay = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        decayed = parameter.dim() == 2 and "embedding" not in name and "conv" not in name
        assert decay[id(parameter)] == (0.1 if decayed else 0.0), name


def test_muon_gets_the_matrices_of_the_blocks() -> None:
    model = LanguageModel(ModelConfig(300, 16, 1, 2, 8, 24))
    muon, adamw = make_optimizers(model, "muon", 1e-3, 0.1)
    assert isinstance(muon, torch.optim.Muon)
    assert all(p.dim() == 2 for g in muon.param_groups for p in g["params"])
    assert any(p is model.embedding.weight for g in adamw.param_groups for p in g["params"])


def test_unknown_optimizer_is_refused() -> None:
    model = LanguageModel(ModelConfig(300, 16, 1, 2, 8, 24))
    with pytest.raises(ValueError, match="'sgd'"):
        make_optimizers(model, "sgd", 1e-3, 0.1)
