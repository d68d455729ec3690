"""The folder of a comparison: one JSON file per finished run, and what all runs share.

RUNS/tokenizer.json, RUNS/cache/      made once
RUNS/<question>-<...>-<seed>.json     a finished run
RUNS/work/<...>/                      what an interrupted run continues from, then its model
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from benchmarks.report import Figures
from model.tokenizer import Tokenizer, train_tokenizer
from model.training.data import tokenize_file

VOCAB_SIZE = 2048


class RunError(RuntimeError):
    """A run that gave no figures."""


@dataclass(frozen=True)
class Folder:
    """Where the runs of one comparison are kept."""

    path: Path

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    def work(self, name: str) -> Path:
        return self.path / "work" / name

    def result(self, name: str) -> Path:
        return self.path / f"{name}.json"

    def prepare(self, data: list[Path], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
        """The tokenizer, learnt from ``data`` where there is none, and its tokens in the cache.

        Raises `RunError` where the folder belongs to other texts.
        """
        self.cache.mkdir(parents=True, exist_ok=True)
        path, digests = self.path / "tokenizer.json", _digests(data)
        made_from = self.path / "data.json"
        if not path.is_file():
            train_tokenizer(data, vocab_size).save(path)
            made_from.write_text(json.dumps(digests), encoding="utf-8")
        if json.loads(made_from.read_text(encoding="utf-8")) != digests:
            raise RunError(f"{self.path} was made from other texts than {list(digests)}")
        tokenizer = Tokenizer.load(path)
        for path in data:
            tokenize_file(path, tokenizer, self.cache)
        return tokenizer

    def share_cache(self, work: Path) -> None:
        """Lets a training run that works in ``work`` find the tokens that are there already."""
        work.mkdir(parents=True, exist_ok=True)
        link = work / "cache"
        if not link.exists():
            link.symlink_to(self.cache.resolve(), target_is_directory=True)

    def run_once(self, name: str, run: Callable[[], Figures]) -> None:
        """Writes what ``run`` returns, unless that is done."""
        if self.result(name).is_file():
            print(f"{name}: done, skipped", flush=True)
            return
        on, started = machine(), time.monotonic()
        try:
            figures = run()
        except RunError as error:
            raise RunError(f"{name}: {error}") from error
        self.write(name, {**origin(on), **figures})
        print(f"{name}: done in {time.monotonic() - started:.0f} s", flush=True)

    def write(self, name: str, figures: Figures) -> None:
        """Replaces a result in one piece."""
        self.result(name).parent.mkdir(parents=True, exist_ok=True)
        partial = self.result(name).with_suffix(".partial")
        partial.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.result(name))


def origin(on: Figures) -> Figures:
    """Where figures come from: command line, files by their names, machine, versions, date."""
    if torch.cuda.is_available():
        on = {**on, "accelerator": torch.cuda.get_device_name()}
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return {
        "command": " ".join(["python -m benchmarks.studies.mechanisms", *words]),
        "machine": {**on, "threads": torch.get_num_threads()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def read_results(path: Path) -> list[dict[str, Any]]:
    """The finished runs in a folder, each with its file's name as ``name``."""
    return [
        {"name": file.stem, **json.loads(file.read_text(encoding="utf-8"))}
        for file in sorted(path.glob("*.json"))
        if file.name not in ("tokenizer.json", "data.json", "results.json")
    ]


def _digests(files: list[Path]) -> dict[str, str]:
    return {file.name: sha256(file.read_bytes()).hexdigest()[:16] for file in files}
