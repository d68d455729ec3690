"""From a trained model to one with another attention, in two stages.

The target starts with all weights that it shares with the source by name and
shape: embeddings, norms, MLPs, and mostly q, k, v and the output. Then its
attention is matched to the source's layer by layer (`match`), and then all of
it is trained on text as any model here is (`model.training.loop`).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.architectures.network import Network
from model.checkpoint import load_checkpoint
from model.convert.match import match_layers
from model.convert.report import ConversionReport
from model.convert.source import as_block
from model.convert.swap import copy_shared, target_config
from model.lm import LanguageModel
from model.training.config import TrainConfig
from model.training.errors import TrainingError
from model.training.evaluate import evaluate
from model.training.loop import VALID_BYTES, Run


@dataclass(frozen=True)
class Conversion:
    """One conversion; ``training`` is of the second stage, whose data the first one reads too."""

    source: str
    attention: str
    attention_options: dict[str, Any]
    match_steps: int
    training: TrainConfig

    def __post_init__(self) -> None:
        if self.match_steps < 0:
            raise TrainingError(f"match_steps must be 0 or more, not {self.match_steps}")
        if not self.training.valid:
            raise TrainingError("a conversion needs a validation text")


def convert(conversion: Conversion) -> ConversionReport:
    """Converts; the model comes into OUT/model, the report next to it.

    Raises what `load_checkpoint` raises, and `ConfigError`, `DataError` and `TrainingError`.
    """
    config = conversion.training
    if config.threads:
        torch.set_num_threads(config.threads)
    source = load_checkpoint(conversion.source)
    original = as_block(source)
    run = Run(
        config,
        target_config(original.config, conversion.attention, conversion.attention_options),
        source.tokenizer,
    )
    try:
        original = original.to(run.device)
        if run.step:
            raise TrainingError(f"{config.out} holds a training run: use another --out")
        report = _convert(conversion, original, run)
    finally:
        run.close()
    report.save(config.out)
    return report


def _convert(conversion: Conversion, original: LanguageModel, run: Run) -> ConversionReport:
    config, num_tokens = run.config, run.config.batch_size * run.config.window
    target = run.model
    assert isinstance(target, LanguageModel), type(target)
    fresh = copy_shared(original, target)
    bits = {"original": _bits_per_byte(original, run), "swapped": _bits_per_byte(target, run)}
    curve = [(0, bits["swapped"])]
    # The windows after those of the second stage.
    batches = (
        run.batches.batch(config.num_steps + step)[0].to(run.device)
        for step in range(conversion.match_steps)
    )
    errors = match_layers(
        original, target, batches, conversion.match_steps, config, lambda: _autocast(run)
    )
    match_tokens = conversion.match_steps * num_tokens
    if errors:
        bits["matched"] = _bits_per_byte(target, run)
        curve.append((match_tokens, bits["matched"]))
    _fine_tune(run)
    curve += [(match_tokens + tokens, value) for tokens, value in _logged(config.out)]
    bits["fine_tuned"] = _bits_per_byte(load_checkpoint(config.out / "model").model, run)
    return ConversionReport(
        source=Path(conversion.source).name,
        attention=conversion.attention,
        attention_options=target.config.attention_options,
        original_attention=original.config.attention,
        parameters=target.num_parameters(),
        fresh_tensors=fresh,
        window=config.window,
        match_tokens=match_tokens,
        fine_tune_tokens=run.num_tokens,
        match_error=list(zip(errors[0], errors[-1], strict=True)) if errors else [],
        bits_per_byte=bits,
        curve=curve,
    )


def _fine_tune(run: Run) -> None:
    """All parameters, the language-model loss; the best model so far is kept in OUT/model."""
    while run.step < run.config.num_steps:
        run.train_step()
        if run.step % run.config.eval_every == 0 or run.step == run.config.num_steps:
            run.evaluate()


def _bits_per_byte(model: Network, run: Run) -> float:
    (valid, *_) = run.config.valid
    model.to(run.device).eval()
    with _autocast(run):
        result = evaluate(model, run.tokenizer, valid, "windows", run.config.window, VALID_BYTES)
    model.train()
    return result.bits_per_byte


def _autocast(run: Run) -> torch.autocast:
    """The precision of the run, which matching and all evaluations share with fine-tuning."""
    dtype = run.autocast_dtype
    return torch.autocast(run.device.type, dtype=dtype, enabled=dtype is not None)


def _logged(out: Path) -> list[tuple[int, float]]:
    """Tokens and bits per byte of the evaluations in a run's log."""
    with (out / "log.csv").open(newline="", encoding="utf-8") as file:
        return [
            (int(row["tokens"]), float(row["valid_bits_per_byte"]))
            for row in csv.DictReader(file)
            if row["valid_bits_per_byte"]
        ]
