"""What a step trains on: a pure function of the step, so that a stopped run continues alike.

A sequence is T + 1 tokens: a piece of a book or of stories that starts anywhere; chats that the
source wrote, from the beginning of one on, one after the other in the shard; or a made recall text.
Source and student read the same tokens, so that chats that follow each other in a sequence are one
text to both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.convert.linearize.recall_tasks import recall_text
from model.evaluation import documents
from model.tokenizer import Tokenizer

#: Ids of a text, and where its documents begin.
Ids = NDArray[np.uint16]
SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True)
class Shares:
    """How often a sequence is of each kind; the rest is books."""

    chats: float = 0.35
    recall: float = 0.2
    stories: float = 0.2


@dataclass(frozen=True)
class Sequence:
    """``ids`` [T + 1], and ``marked`` [T + 1] bool: tokens that recall alone predicts."""

    ids: Tensor
    marked: Tensor


def tokenized(file: Path, tokenizer: Tokenizer, cache: Path) -> Ids:
    """All documents of a text, each followed by `SEPARATOR`; kept as a file in ``cache``."""
    path = cache / f"{file.stem}.u16"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        separator = tokenizer.special_ids[SEPARATOR]
        ids = [
            np.array([*tokenizer.encode(text), separator], np.uint16) for text in documents(file)
        ]
        partial = path.with_suffix(".partial")
        np.concatenate(ids).tofile(partial)
        partial.replace(path)
    return np.memmap(path, np.uint16, "r")


@dataclass(frozen=True)
class Shard:
    """Chats of the source, and where each begins."""

    ids: Ids
    starts: NDArray[np.int64]


def read_shards(folder: Path) -> list[Shard]:
    """Those in a folder, by name."""
    shards = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as arrays:
            shards.append(Shard(arrays["ids"], arrays["starts"]))
    return shards


class Sequences:
    """Sequences by step and row."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        books: list[Ids],
        stories: Ids,
        chats: list[Shard],
        shares: Shares,
        seed: int,
    ) -> None:
        self._tokenizer, self._books, self._stories = tokenizer, books, stories
        self._chats, self._seed = chats, seed
        self._shares = shares if chats else replace(shares, chats=0.0)

    def draw(self, step: int, row: int, num_tokens: int) -> Sequence:
        """The sequence of ``num_tokens`` + 1 tokens of a row of a step."""
        rng = np.random.default_rng([self._seed, step, row])
        length, kind = num_tokens + 1, rng.random()
        if kind < self._shares.recall:
            text = recall_text(rng, self._tokenizer, self._filler, length)
            return Sequence(torch.tensor(text.ids), torch.tensor(text.marked))
        kind -= self._shares.recall
        if kind < self._shares.chats:
            ids = self._chat(rng, length)
        elif kind < self._shares.chats + self._shares.stories:
            ids = _piece(rng, self._stories, length)
        else:
            ids = _piece(rng, self._books[int(rng.integers(len(self._books)))], length)
        tokens = torch.from_numpy(ids.astype(np.int64))
        return Sequence(tokens, torch.zeros(length, dtype=torch.bool))

    def _chat(self, rng: np.random.Generator, length: int) -> Ids:
        sizes = np.array([len(shard.ids) for shard in self._chats], float)
        shard = self._chats[int(rng.choice(len(sizes), p=sizes / sizes.sum()))]
        fit = shard.starts[shard.starts + length <= len(shard.ids)]
        start = int(rng.choice(fit)) if len(fit) else 0
        return np.resize(shard.ids[start : start + length], length)

    def _filler(self, rng: np.random.Generator, length: int) -> list[int]:
        source = self._stories if rng.random() < 0.7 else self._books[0]
        ids = _piece(rng, source, length)
        return [int(id) for id in ids if id != self._tokenizer.special_ids[SEPARATOR]]


def _piece(rng: np.random.Generator, ids: Ids, length: int) -> Ids:
    start = int(rng.integers(max(1, len(ids) - length)))
    return ids[start : start + length]


def common_ids(arrays: list[Ids], vocab_size: int, count: int) -> Tensor:
    """The ``count`` ids that occur most in ``arrays``, in ascending order [count] int64.

    A loss over these alone costs a third of that over SmolLM2's whole vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    for ids in arrays:
        counts += np.bincount(ids, minlength=vocab_size)
    counts[:256] += 1 << 40  # special ids, and the bytes that all else can be written with
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))
