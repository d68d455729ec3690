"""What a folder of `everstream train` says of its run: the command, its cost, the curves."""

from __future__ import annotations

import csv
import inspect
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Figures
from model.config import ModelConfig
from model.training.cli import default_embedding_rate, train_command
from model.training.report import COLUMNS

#: Points of a curve, which is thinned to them.
NUM_POINTS = 200
#: Columns of ``log.csv`` before those of single validation texts; the last is their mean.
_STEP_COLUMNS = len(COLUMNS)
#: Options of the model, by their names in its configuration.
_OF_THE_MODEL = {
    "attention": "attention",
    "attention_options": "attention_options",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
}
#: Options that `command_of` writes by rules of their own.
_BY_RULE = ("data", "final_data", "valid", "tokenizer")


def facts_of_run(folder: Path) -> Figures:
    """The run in ``folder``: its command, texts, steps, tokens, seconds and curves."""
    progress = json.loads((folder / "progress" / "progress.json").read_text(encoding="utf-8"))
    identity, rows = progress["identity"], list(_log(folder / "log.csv"))
    tokens_per_step = identity["batch_size"] * identity["window"]
    return {
        "command": command_of(identity, folder.name),
        "data": [name for name, _ in _sources(identity, "data", "final_data")],
        "steps": progress["step"],
        "tokens": progress["step"] * tokens_per_step,
        "seconds": round(progress["seconds"]),
        "loss": _thinned([[row["tokens"], row["loss"]] for row in rows]),
        "valid_bits_per_byte": [
            {"tokens": row["tokens"], **row["valid"]} for row in rows if row["valid"]
        ],
    }


def command_of(identity: Figures, name: str) -> str:
    """The command whose run has this ``identity``, with ``name`` as its folder.

    Options that have their default are left out. A run that began with another's weights
    takes them from ``START``.
    """
    parameters = inspect.signature(train_command).parameters
    defaults = {name: each.default for name, each in parameters.items() if name not in _BY_RULE}
    words = ["everstream", "train"]
    for key in ("data", "final_data"):
        for file, weight in _sources(identity, key):
            words += [_flag(key), file if weight == 1 else f"{file}:{weight:g}"]
    valid = identity["valid"] or []
    for file in [valid] if isinstance(valid, str) else valid:
        words += ["--valid", file]
    untold = ModelConfig.for_training(identity["model"]["vocab_size"], 0, {}).to_dict()
    model = {
        option: json.dumps(value) if isinstance(value, dict) else value
        for key, option in _OF_THE_MODEL.items()
        if (value := identity["model"][key]) != untold[key]
    }
    if identity.get("initial"):
        words, model = [*words, "--init-from", "START"], {}
    else:
        words += ["--tokenizer", "tokenizer.json"]
    options = {"steps" if key == "num_steps" else key: value for key, value in identity.items()}
    rate = options["learning_rate"]
    defaults["embedding_learning_rate"] = default_embedding_rate(options["optimizer"], rate)
    options["embedding_learning_rate"] = options.get("embedding_learning_rate") or rate
    for key, value in {**model, **options}.items():
        if key in defaults and value not in (None, defaults[key]):
            words += [_flag(key), f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join([*words, "--out", f"runs/{name}"])


def _sources(identity: Figures, *keys: str) -> Iterator[tuple[str, float]]:
    """Names of texts and how often each is read."""
    for source in (each for key in keys for each in identity.get(key, [])):
        name, weight = (source, 1.0) if isinstance(source, str) else source
        yield name, weight


def _log(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of ``log.csv``: tokens, loss, and what was validated, by text."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            names = list(row)[_STEP_COLUMNS:] or list(row)[_STEP_COLUMNS - 1 :]
            valid = {name: float(row[name]) for name in names if row[name]}
            yield {"tokens": int(row["tokens"]), "loss": float(row["loss"]), "valid": valid}


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """At most `NUM_POINTS`, each the mean of those that it stands for; x is the last one's."""
    size = -(-len(points) // NUM_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [[group[-1][0], round(sum(y for _, y in group) / len(group), 4)] for group in groups]


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
