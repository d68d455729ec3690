"""Why a kernel must be positive: trains ``phi(x) = x``, the plain linear kernel, and `elu`.

    python -m benchmarks.linear_kernel --data book.txt

Its weights ``q . k`` have both signs, so the denominator crosses zero. Printed are, for
both, the training loss and how large it became, and how many denominators of the linear
kernel are negative before training.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import machine
from benchmarks.report import Figures, print_result
from model.attention import MECHANISMS, specs
from model.attention.linear import LinearAttention
from model.config import ModelConfig
from model.lm import LanguageModel
from model.tokenizer import Tokenizer, train_tokenizer
from model.training.data import Source
from model.training.loop import Run, TrainConfig, TrainingError

NAME = "plain_linear"
STEPS_PER_ROW = 20


class PlainLinearAttention(LinearAttention):
    """``sum_j (q . k_j) v_j / sum_j (q . k_j)`` with nothing done about its denominator."""

    def features(self, x: Tensor) -> Tensor:
        return x

    def denominator(self, den: Tensor) -> Tensor:
        self.last_denominator = den.detach()
        return den


def negative_denominators(model: LanguageModel, tokens: Tensor) -> float:
    """The part of all layers' denominators below zero when they read ``tokens`` [B, T]."""
    with torch.no_grad():
        model.parallel(tokens)
    values = torch.cat([block.attention.last_denominator.flatten() for block in model.blocks])
    return float((values < 0).float().mean())


def losses(attention: str, data: Path, tokenizer: Tokenizer, num_steps: int, out: Path) -> Figures:
    """The mean loss of every `STEPS_PER_ROW` steps, and where training had to stop."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=32,
        intermediate_size=160,
        attention=attention,
    )
    recipe = TrainConfig(
        data=(Source(data),),
        out=out,
        num_steps=num_steps,
        batch_size=8,
        window=256,
        warmup_steps=20,
        precision="float32",
        threads=1,
    )
    run, stopped = Run(recipe, config, tokenizer), ""
    figures: Figures = {}
    if attention == NAME:
        tokens = run.batches.batch(0)[0]
        figures["negative_denominators"] = round(negative_denominators(run.model, tokens), 3)
    try:
        while run.step < num_steps and not stopped:
            run.train_step()
    except TrainingError as error:
        stopped = str(error)
    run.close()
    rows = (out / "log.csv").read_text(encoding="utf-8").splitlines()[1:]
    values = [float(row.split(",")[3]) for row in rows]
    parts = [values[i : i + STEPS_PER_ROW] for i in range(0, len(values), STEPS_PER_ROW)]
    figures["loss"] = [round(sum(part) / len(part), 3) for part in parts]
    figures["largest_loss"] = round(max(values), 3)
    figures["stopped"] = stopped
    return figures


def main() -> None:
    """Trains both and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    MECHANISMS[NAME] = (specs.LINEAR, "benchmarks.linear_kernel", "PlainLinearAttention")
    torch.set_num_threads(1)
    on = machine()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_tokenizer([arguments.data], 1024)
        figures = {
            name: losses(name, arguments.data, tokenizer, arguments.steps, Path(folder) / name)
            for name in ("elu", NAME)
        }
    print_result("linear_kernel", on, figures)


if __name__ == "__main__":
    main()
