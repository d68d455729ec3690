"""Training with the kernels and with their definitions: the same curve on the same tokens."""

from __future__ import annotations

import csv
import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from model.config import ModelConfig
from model.ops.fused import without_kernels
from model.tokenizer import Tokenizer
from model.training.data import Source
from model.training.loop import TrainConfig, train

STEPS = 40
#: Of any step's loss in nats, which falls from 5.6 to about 4.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.03}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "precision"),
    [("delta", "float32"), ("delta", "bfloat16"), ("gated", "bfloat16")],
)
def test_loss_curve_is_that_of_the_definitions(
    attention: str,
    precision: str,
    corpus: Path,
    tokenizer: Tokenizer,
    tiny: ModelConfig,
    tmp_path: Path,
) -> None:
    model = dataclasses.replace(tiny, attention=attention)

    def curve(kernels: bool) -> torch.Tensor:
        out = tmp_path / str(kernels)
        # Not Muon, whose own products in bfloat16 amplify any difference.
        config = TrainConfig(
            data=(Source(corpus),),
            out=out,
            num_steps=STEPS,
            batch_size=4,
            window=32,
            warmup_steps=5,
            optimizer="adamw",
            learning_rate=2e-3,
            precision=precision,
            threads=1,
        )
        with nullcontext() if kernels else without_kernels():
            train(config, model, tokenizer)
        with (out / "log.csv").open(encoding="utf-8") as file:
            return torch.tensor([float(row["loss"]) for row in csv.DictReader(file)])

    fused, reference = curve(True), curve(False)
    assert fused[-1] < fused[0] - 1.0
    assert (fused - reference).abs().max() < TOLERANCES[precision]
