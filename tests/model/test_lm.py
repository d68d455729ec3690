from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.architectures.network import ModelState
from model.config import ModelConfig
from model.lm import LanguageModel
from tests.tiny import tiny_checkpoint

MECHANISMS = ["elu", "gated", "softmax"]


@pytest.fixture(params=MECHANISMS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return tiny_checkpoint(request.param).model


def tokens(length: int) -> Tensor:
    return torch.randint(300, (2, length), generator=torch.Generator().manual_seed(0))


def at(position: int) -> Tensor:
    return torch.full((2,), position)


def test_three_forms_agree(model: LanguageModel) -> None:
    ids = tokens(130)
    wanted = model.parallel(ids)
    first, state = model.chunk(ids[:, :65], model.empty_state(2), at(0))
    second, state = model.chunk(ids[:, 65:128], state, at(65))
    third, state = model.step(ids[:, 128], state, at(128))
    fourth, _ = model.step(ids[:, 129], state, at(129))
    found = torch.cat([first, second, third.unsqueeze(1), fourth.unsqueeze(1)], dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)


def test_hidden_forms_are_the_logits_without_the_head(model: LanguageModel) -> None:
    ids = tokens(20)
    assert torch.equal(model.logits(model.hidden_parallel(ids)), model.parallel(ids))
    hidden, _ = model.hidden_chunk(ids, model.empty_state(2), at(0))
    assert torch.equal(model.logits(hidden), model.chunk(ids, model.empty_state(2), at(0))[0])


def test_untied_head_has_its_own_weights() -> None:
    model = LanguageModel(ModelConfig(vocab_size=300, hidden_size=16, tie_word_embeddings=False))
    assert model.head_weight is model.head.weight
    assert (
        model.num_parameters() - 300 * 16
        == LanguageModel(ModelConfig(vocab_size=300, hidden_size=16)).num_parameters()
    )


@pytest.mark.parametrize("attention", MECHANISMS)
def test_initial_model_is_nearly_uniform(attention: str) -> None:
    model = LanguageModel(ModelConfig(vocab_size=300, attention=attention))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # whatever init_weights forgets shows
    model.init_weights(torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(
        model.parallel(tokens(40)).flatten(0, 1), tokens(40).flip(0).flatten()
    )
    assert loss.item() == pytest.approx(torch.tensor(300.0).log().item(), rel=0.1)


def test_long_stream_stays_finite() -> None:
    for attention in ("elu", "gated"):
        model = tiny_checkpoint(attention).model
        state: ModelState = model.empty_state(2)
        for start in range(0, 20_000, 2000):
            logits, state = model.chunk(tokens(2000), state, at(start))
        assert logits.isfinite().all()
