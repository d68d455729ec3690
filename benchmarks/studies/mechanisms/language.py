"""``train``: one language model per mechanism, size and seed, and what its text costs in bits."""

from __future__ import annotations

import csv
import dataclasses
import statistics
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Figures
from benchmarks.studies.mechanisms.folder import Folder, RunError
from benchmarks.studies.mechanisms.quality import read_documents, score
from benchmarks.studies.mechanisms.specs import SIZES, Spec, state_bytes
from model.architectures.config import Config
from model.checkpoint import load_checkpoint
from model.state import kv_cache_bytes_per_token
from model.training import TrainingError
from model.training.data import Source
from model.training.loop import TrainConfig, train

#: Steps whose mean loss is reported as the training loss.
LAST_STEPS = 50
#: The log has seconds to this.
LOGGED_S = 0.1
#: More than any run has, so that nothing but the last step evaluates or samples.
NEVER = 10**9


@dataclass(frozen=True)
class Recipe:
    """What all runs of a comparison share."""

    data: tuple[Path, ...]
    valid: Path
    out_of_domain: Path
    num_steps: int = 400
    batch_size: int = 8
    window: int = 512
    warmup_steps: int = 40
    optimizer: str = "muon"
    learning_rate: float = 6e-3
    device: str = "cpu"
    precision: str = "auto"
    eval_bytes: int = 200_000

    @property
    def num_tokens(self) -> int:
        """What a run reads."""
        return self.num_steps * self.batch_size * self.window


def run(folder: Folder, name: str, size: str, spec: Spec, seed: int, recipe: Recipe) -> Figures:
    """Trains, or continues with, the run ``name`` and scores it; returns the figures of its file.

    Raises `RunError` where the loss is not finite, and `KeyboardInterrupt` where a
    signal ended the training early: the next call continues.
    """
    tokenizer = folder.prepare(list(recipe.data))
    config = spec.config(SIZES[size], tokenizer.vocab_size, tokenizer.eos_token_id)
    work = folder.work(name)
    folder.share_cache(work)
    train_config = training(recipe, work, seed)
    try:
        trained = train(train_config, config, tokenizer)
    except TrainingError as error:
        raise RunError(str(error)) from error
    rows = read_log(work / "log.csv")
    if len(rows) < recipe.num_steps:
        raise KeyboardInterrupt
    checkpoint = load_checkpoint(trained)
    model = checkpoint.model.to(train_config.device)
    texts = {"valid": recipe.valid, "out_of_domain": recipe.out_of_domain}
    quality = {
        name: {
            "file": path.name,
            **score(
                model,
                tokenizer.eos_token_id,
                read_documents(path, tokenizer, recipe.eval_bytes),
                lambda: autocast(recipe),
            ),
        }
        for name, path in texts.items()
    }
    return {
        "kind": "language",
        "size": size,
        "mechanism": str(spec),
        "seed": seed,
        "num_parameters": model.num_parameters(),
        **session_bytes(config),
        "recipe": _recipe(recipe),
        "config": config.to_dict(),
        "tokenizer": tokenizer.digest,
        "training": training_figures(rows, recipe),
        "quality": quality,
    }


def training(recipe: Recipe, out: Path, seed: int) -> TrainConfig:
    """The run as the training loop takes it; no text is scored while it continues."""
    return TrainConfig(
        data=tuple(Source(path) for path in recipe.data),
        out=out,
        num_steps=recipe.num_steps,
        batch_size=recipe.batch_size,
        window=recipe.window,
        optimizer=recipe.optimizer,
        learning_rate=recipe.learning_rate,
        warmup_steps=recipe.warmup_steps,
        seed=seed,
        device=recipe.device,
        precision=recipe.precision,
        eval_every=NEVER,
        sample_every=NEVER,
    )


def autocast(recipe: Recipe) -> AbstractContextManager[Any]:
    """The precision of the training, for all but the head."""
    if precision(recipe) == "float32":
        return nullcontext()
    return torch.autocast(recipe.device, dtype=torch.bfloat16)


def precision(recipe: Recipe) -> str:
    """What "auto" comes to on this machine."""
    if recipe.precision != "auto":
        return recipe.precision
    return "bfloat16" if native_bfloat16(recipe.device) else "float32"


def native_bfloat16(device: str) -> bool:
    """Whether training and serving take bfloat16 by themselves."""
    return device == "cuda" or torch.cpu._is_avx512_bf16_supported()


def session_bytes(config: Config) -> Figures:
    """What a session keeps: constant, or so much per token in 16 bits, as servers cache."""
    constant = state_bytes(config)
    if constant is not None:
        return {"state_bytes": constant}
    return {"cache_bytes_per_token": kv_cache_bytes_per_token(config)}


def training_figures(rows: list[dict[str, str]], recipe: Recipe) -> Figures:
    """From the log: losses, and the speed next to whatever else ran on the machine."""
    losses = [float(row["loss"]) for row in rows]
    num_tokens, seconds = int(rows[-1]["tokens"]), float(rows[-1]["seconds"])
    return {
        "num_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": round(num_tokens / max(seconds, LOGGED_S)),
        "last_loss": round(statistics.fmean(losses[-LAST_STEPS:]), 4),
        "losses": [
            round(statistics.fmean(losses[start : start + 10]), 4)
            for start in range(0, recipe.num_steps, 10)
        ],
    }


def read_log(path: Path) -> list[dict[str, str]]:
    """The rows of a run's ``log.csv``."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _recipe(recipe: Recipe) -> Figures:
    paths = {"valid": recipe.valid.name, "out_of_domain": recipe.out_of_domain.name}
    data = [path.name for path in recipe.data]
    used = {"data": data, "precision": precision(recipe)}
    return {**dataclasses.asdict(recipe), **paths, **used}
