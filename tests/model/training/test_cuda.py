"""Steps on a CUDA device, which are replayed graphs, next to the same steps on the CPU."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest
import torch

from model.attention import MECHANISMS
from model.config import ModelConfig
from model.tokenizer import Tokenizer
from model.training.loop import TrainConfig, train
from tests.model.training.conftest import assert_same_run, elsewhere

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def losses(out: Path) -> list[float]:
    with (out / "log.csv").open(newline="", encoding="utf-8") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("attention", MECHANISMS)
def test_losses_are_those_of_the_cpu(
    attention: str, corpus_config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    model = dataclasses.replace(tiny, attention=attention, attention_options={})
    found = []
    for device in ("cpu", "cuda"):
        config = elsewhere(corpus_config, device, device=device, num_steps=8)
        train(config, model, tokenizer)
        found.append(losses(config.out))
    assert found[0] == pytest.approx(found[1], abs=0.02)


def test_run_continues_bit_for_bit(
    corpus_config: TrainConfig, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    whole = elsewhere(corpus_config, "whole", device="cuda", dropout=0.2)
    train(whole, tiny, tokenizer)
    parts = dataclasses.replace(whole, out=corpus_config.out)
    train(dataclasses.replace(parts, stop_at_step=2), tiny, tokenizer)
    train(parts, tiny, tokenizer)
    assert_same_run(whole.out, parts.out)
