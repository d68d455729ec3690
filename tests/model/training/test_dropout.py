"""What dropout drops: so many channels, the same ones again in a run that continues."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from model.architectures import config_class
from model.architectures.network import network_class
from model.config import ModelConfig
from model.lm import LanguageModel
from model.tokenizer import Tokenizer
from model.training import TrainingError
from model.training.loop import Run, TrainConfig, train
from model.training.passes import ResidualDropout
from tests.model.training.conftest import assert_same_run, elsewhere

CPU = torch.device("cpu")


@pytest.fixture
def model() -> LanguageModel:
    model = LanguageModel(ModelConfig(300, 64, 2, 2, 8, 24))
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.down.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


def test_share_of_channels_is_dropped_and_the_rest_made_larger(model: LanguageModel) -> None:
    down = model.blocks[0].mlp.down
    x = torch.randn(400, 24, generator=torch.Generator().manual_seed(2))
    wanted = down(x)
    dropout = ResidualDropout(model, 0.25, seed=3)
    dropout.start(5, 0, CPU)
    found = down(x)
    dropped = found == 0
    assert abs(float(dropped.float().mean()) - 0.25) < 0.02
    torch.testing.assert_close(found[~dropped], wanted[~dropped] / 0.75)
    model.eval()
    assert torch.equal(down(x), wanted)


def test_what_is_dropped_depends_on_seed_step_and_row(model: LanguageModel) -> None:
    tokens = torch.arange(40).view(2, 20)
    dropout, seeds = ResidualDropout(model, 0.5, seed=3), [(5, 0), (5, 0), (5, 8), (6, 0)]
    outputs = []
    for step, row in seeds:
        dropout.start(step, row, CPU)
        outputs.append(model.hidden_parallel(tokens))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[3])


def test_run_with_dropout_continues_bit_for_bit(
    corpus_config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    whole = elsewhere(corpus_config, "whole", dropout=0.3, batch_size=20, threads=2)
    train(whole, tiny, tokenizer)
    parts = dataclasses.replace(whole, out=corpus_config.out, threads=1)
    train(dataclasses.replace(parts, stop_at_step=2), tiny, tokenizer)
    train(parts, tiny, tokenizer)
    assert_same_run(whole.out, parts.out)
    without = elsewhere(corpus_config, "without", batch_size=20)
    train(without, tiny, tokenizer)
    with pytest.raises(AssertionError):
        assert_same_run(whole.out, without.out)


def test_dropout_out_of_range_is_refused(corpus_config: TrainConfig) -> None:
    with pytest.raises(TrainingError, match=r"dropout must be in \[0, 1\), not 1.0"):
        dataclasses.replace(corpus_config, dropout=1.0)


def test_other_families_have_none(corpus_config: TrainConfig, tokenizer: Tokenizer) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "head_dim": 16, "intermediate_size": 32}
    config = config_class("rwkv7").for_training(tokenizer.vocab_size, 0, sizes)
    assert network_class(config) is not LanguageModel
    with pytest.raises(TrainingError, match="dropout is of the model_type 'everstream' alone"):
        Run(dataclasses.replace(corpus_config, dropout=0.1), config, tokenizer)
