"""The facts of the bundled models' card, measured: shapes, hashes, quality, samples, cost.

    python -m benchmarks.studies.model_card.facts --data FOLDER --run everstream-stories=RUN [...]
      [--average everstream-stories=MODEL]

``--data`` is the folder of the training and validation texts. ``--run NAME=RUN`` is a folder
that `everstream train` left, once for each part of a model's training, in their order; the
weights before int8 are the last one's, or with ``--average`` those of MODEL, the mean of all parts.
Writes `RESULT` and a copy of the authors' list
`CREDITS`; `python -m benchmarks.studies.model_card` writes the card from them.

A model without ``--run`` keeps the runs and the figures before int8 that are written there.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import inspect
import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.report import RESULTS, Figures, Result, read_result
from model.bundled_models import FOLDER
from model.checkpoint import Checkpoint, load_checkpoint
from model.config import ModelConfig
from model.evaluation import Half, Mode, evaluate_native
from model.hub.base import whole_models
from model.native.runtime import Runtime
from model.state import StateLayout, kv_cache_bytes_per_token
from model.training.cli import default_embedding_rate, train_command
from model.training.report import COLUMNS
from model.weights import num_parameters
from model.weights.safetensors import WeightFiles
from server.cli.generate import generate_text
from server.engine.sampling import published, with_defaults
from server.models.backend import open_backend

RESULT = RESULTS / "bundled_models.json"
#: The authors of the texts under CC BY, by text; a copy of the list that lies next to the data.
CREDITS = FOLDER / "CREDITS.tsv"
VALIDATION = ("valid.txt", "simple_stories_valid.txt")
CREDITS_OF_DATA = "simple_stories_credits.tsv"

PROMPT, SEEDS, SAMPLE_TOKENS = "Once upon a time", range(1, 21), 200
#: How the stored weights are multiplied: exactly, and as the server does.
COMPUTED = ("float32", "int8")
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


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", action="append", default=[], metavar="NAME=RUN")
    parser.add_argument("--average", action="append", default=[], metavar="NAME=MODEL")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    runs: dict[str, list[Path]] = {}
    for text in options.run:
        name, _, run = text.partition("=")
        if name not in whole_models() or not run:
            parser.error(f"--run: NAME=RUN with a name of {', '.join(whole_models())}")
        runs.setdefault(name, []).append(Path(run))
    averages = {name: Path(model) for name, _, model in (t.partition("=") for t in options.average)}
    written = write(options.data, runs, averages, options.threads)
    print(json.dumps({"benchmark": "bundled_models", "models": list(written["models"])}))


def write(
    data: Path, runs: dict[str, list[Path]], averages: dict[str, Path], threads: int = 1
) -> Figures:
    """Measures every bundled model and writes `RESULT` and `CREDITS`."""
    result = Result("model_card.facts", RESULT)
    before = read()["models"] if RESULT.is_file() else {}
    models = {
        name: measured(
            folder, data, runs.get(name, []), averages.get(name), before.get(name, {}), threads
        )
        for name, folder in whole_models().items()
    }
    texts = [text for model in models.values() for run in model["runs"] for text in run["data"]]
    names = dict.fromkeys([*texts, *VALIDATION, CREDITS_OF_DATA])
    figures = {
        "prompt": PROMPT,
        "max_tokens": SAMPLE_TOKENS,
        "sampling": published(),
        "data": {name: file_facts(data / name) for name in names},
        "models": models,
    }
    shutil.copyfile(data / CREDITS_OF_DATA, CREDITS)
    result.save(figures)
    return figures


def read() -> Figures:
    """The committed results."""
    return read_result(RESULT)


def measured(
    folder: Path,
    data: Path,
    runs: Sequence[Path],
    average: Path | None,
    before: Figures,
    threads: int,
) -> Figures:
    """All that the card says of one model; ``before`` is what was written of it."""
    checkpoint = load_checkpoint(folder)
    quality = [
        {"computed": dtype, **row}
        for dtype in COMPUTED
        for row in bits_per_byte(checkpoint, dtype, data, threads)
    ]
    known = {
        "runs": before.get("runs", []),
        "averaged": before.get("averaged", False),
        "unrounded": before.get("unrounded", []),
    }
    if runs:
        trained = load_checkpoint(average or runs[-1] / "model")
        known["runs"] = [facts_of_run(run) for run in runs]
        known["averaged"] = average is not None
        known["unrounded"] = list(bits_per_byte(trained, "float32", data, threads))
    return {
        **shape_facts(checkpoint),
        "files": {path.name: file_facts(path) for path in sorted(folder.iterdir())},
        "quality": quality,
        **known,
        "samples": samples(checkpoint, threads),
    }


def shape_facts(checkpoint: Checkpoint) -> Figures:
    """What follows from the configuration and the files' headers."""
    config, weights = checkpoint.config, checkpoint.weights
    assert isinstance(weights, WeightFiles)
    return {
        "config": config.to_dict(),
        "parameters": num_parameters(config),
        "stored_dtype": weights.stored_dtype,
        "state_bytes": StateLayout.of(config).num_bytes,
        "kv_cache_bytes_per_token": kv_cache_bytes_per_token(config),
        "digest": checkpoint.digest,
    }


def file_facts(path: Path) -> dict[str, Any]:
    """Bytes and SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def bits_per_byte(
    checkpoint: Checkpoint, dtype: str, data: Path, threads: int
) -> Iterator[dict[str, Any]]:
    """A row for each validation text, half and mode."""
    runtime = Runtime(checkpoint.config, checkpoint.weights, dtype, threads)
    modes: tuple[Mode, ...] = ("windows", "stream")
    for name in VALIDATION:
        for half in get_args(Half):
            for mode in modes:
                found = evaluate_native(runtime, checkpoint.tokenizer, data / name, mode, half=half)
                value = round(found.bits_per_byte, 4)
                yield {"data": name, "half": half, "mode": mode, "bits_per_byte": value}


def samples(checkpoint: Checkpoint, threads: int) -> list[dict[str, Any]]:
    """A text for each of `SEEDS` at the default sampling, none left out."""
    backend = open_backend(checkpoint, threads=threads)
    found = []
    for seed in SEEDS:
        parts: list[str] = []
        sampling = with_defaults(seed=seed, max_tokens=SAMPLE_TOKENS)
        generate_text(backend, PROMPT, sampling, parts.append)
        found.append({"seed": seed, "text": "".join(parts)})
    return found


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
            words.append(_flag(key))
            if value is not True:
                words.append(f"{value:g}" if isinstance(value, float) else str(value))
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
    """At most `NUM_POINTS`, each the mean of several; x is the last one's."""
    size = -(-len(points) // NUM_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [[group[-1][0], round(sum(y for _, y in group) / len(group), 4)] for group in groups]


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


if __name__ == "__main__":
    main()
