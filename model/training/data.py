"""Texts as one memory-mapped array of token ids, and the windows that training reads from it.

Every window is a pure function of the step, so an interrupted run goes on with
the very tokens it would have read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.evaluation import DataError, documents
from model.tokenizer import Tokenizer

__all__ = ["DataError", "StreamBatches", "documents", "tokenize_files"]


def tokenize_files(files: Sequence[Path], tokenizer: Tokenizer, cache: Path) -> NDArray[np.uint16]:
    """All documents, each followed by the end-of-text id, as a read-only memory map.

    The array is kept in the folder ``cache`` under a digest of its inputs. Ids
    are uint16, so a vocabulary has at most 65,536 of them.
    """
    if tokenizer.vocab_size > 1 << 16:
        raise DataError(f"the vocabulary of {tokenizer.vocab_size} ids does not fit 16 bits")
    digest = hashlib.sha256(tokenizer.digest.encode())
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    path = cache / f"tokens-{digest.hexdigest()[:16]}.u16"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as out:
            for document in (d for file in files for d in documents(file)):
                ids = [*tokenizer.encode(document), tokenizer.eos_token_id]
                out.write(np.asarray(ids, dtype=np.uint16).tobytes())
        partial.rename(path)
    if path.stat().st_size == 0:
        raise DataError(f"{', '.join(map(str, files))}: no text to train on")
    return np.memmap(path, dtype=np.uint16, mode="r")


@dataclass(frozen=True)
class StreamBatches:
    """``batch_size`` streams that read the corpus in order, each from its own start.

    Row r of step i is the window at ``start_r + i * window``, around the end
    to the beginning. The starts are spread evenly, so that together the rows
    have read the corpus once after ``steps_per_epoch`` steps; ``seed`` shifts
    them all.
    """

    tokens: NDArray[np.uint16]
    batch_size: int
    window: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.window:
            raise DataError(f"{len(self.tokens)} tokens are too few for a window of {self.window}")

    @property
    def steps_per_epoch(self) -> float:
        return len(self.tokens) / (self.batch_size * self.window)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, each [batch_size, window] int64."""
        shift = int(np.random.default_rng(self.seed).integers(len(self.tokens)))
        starts = shift + np.arange(self.batch_size) * len(self.tokens) // self.batch_size
        index = (starts + step * self.window)[:, None] + np.arange(self.window + 1)
        ids = torch.from_numpy(self.tokens[index % len(self.tokens)].astype(np.int64))
        return ids[:, :-1], ids[:, 1:]

    def resets(self, step: int, probability: float) -> Tensor:
        """[batch_size] bool: the rows that start step ``step`` from the empty state."""
        draws = np.random.default_rng((self.seed, step)).random(self.batch_size)
        return torch.from_numpy(draws < (1.0 if step == 0 else probability))
