"""What a step trains on: a pure function of the step, so that a stopped run continues alike.

A sequence is T + 1 tokens: a piece of a book or of stories that starts anywhere; chats that the
source wrote, from the beginning of one on, one after the other in the shard; or a made recall text.
Source and student read the same tokens, so that chats that follow each other in a sequence are one
text to both.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.convert.linearize.chat_format import ChatFormat
from model.convert.linearize.recall_tasks import recall_text
from model.evaluation import DataError, documents
from model.tokenizer import Tokenizer

#: Ids of a text, of 16 or 32 bits by the size of the vocabulary.
Ids = NDArray[np.uint16] | NDArray[np.uint32]
SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True)
class Shares:
    """How often a sequence is of each kind; the rest is texts."""

    chats: float = 0.35
    recall: float = 0.2


@dataclass(frozen=True)
class Text:
    """Ids of a text, and how often it is drawn next to the others."""

    ids: Ids
    weight: float = 1.0


@dataclass(frozen=True)
class Sequence:
    """``ids`` [T + 1], and ``marked`` [T + 1] bool: tokens that recall alone predicts."""

    ids: Tensor
    marked: Tensor


def separator(tokenizer: Tokenizer) -> int:
    """The id between two documents."""
    return tokenizer.special_ids.get(SEPARATOR, tokenizer.eos_token_id)


def tokenized(file: Path, tokenizer: Tokenizer, cache: Path) -> Ids:
    """All documents of a text, each followed by the separator; kept as a file in ``cache``.

    Raises `DataError` for a text without documents.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    with file.open("rb") as text:
        content = hashlib.file_digest(text, "sha256").hexdigest()
    digest = hashlib.sha256(f"{tokenizer.digest} {content}".encode()).hexdigest()[:16]
    path = cache / f"{file.stem}-{digest}.ids"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        ids = [
            np.array([*tokenizer.encode(text), separator(tokenizer)], dtype)
            for text in documents(file)
        ]
        if not ids:
            raise DataError(f"{file} has no text")
        partial = path.with_suffix(".partial")
        np.concatenate(ids).tofile(partial)
        partial.replace(path)
    return np.memmap(path, dtype, "r")


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
    """Sequences by step and row. Without chats their share goes to texts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: list[Text],
        chats: list[Shard],
        shares: Shares,
        seed: int,
        chat: ChatFormat | None,
    ) -> None:
        self._tokenizer, self._texts, self._chat_format = tokenizer, texts, chat
        self._chats, self._seed = chats, seed
        self._shares = shares if chats else replace(shares, chats=0.0)
        weights = np.array([text.weight for text in texts])
        self._weights = weights / weights.sum()

    def draw(self, step: int, row: int, num_tokens: int) -> Sequence:
        """The sequence of ``num_tokens`` + 1 tokens of a row of a step."""
        rng = np.random.default_rng([self._seed, step, row])
        length, kind = num_tokens + 1, rng.random()
        if kind < self._shares.recall:
            text = recall_text(rng, self._tokenizer, self._filler, length, self._chat_format)
            return Sequence(torch.tensor(text.ids), torch.tensor(text.marked))
        is_chat = kind < self._shares.recall + self._shares.chats
        ids = self._chat(rng, length) if is_chat else self._text(rng, length)
        tokens = torch.from_numpy(np.resize(ids, length).astype(np.int64))
        return Sequence(tokens, torch.zeros(length, dtype=torch.bool))

    def _chat(self, rng: np.random.Generator, length: int) -> Ids:
        sizes = np.array([len(shard.ids) for shard in self._chats], float)
        shard = self._chats[int(rng.choice(len(sizes), p=sizes / sizes.sum()))]
        fit = shard.starts[shard.starts + length <= len(shard.ids)]
        start = int(rng.choice(fit)) if len(fit) else 0
        return shard.ids[start : start + length]

    def _text(self, rng: np.random.Generator, length: int) -> Ids:
        ids = self._texts[int(rng.choice(len(self._texts), p=self._weights))].ids
        start = int(rng.integers(max(1, len(ids) - length)))
        return ids[start : start + length]

    def _filler(self, rng: np.random.Generator, length: int) -> list[int]:
        end = separator(self._tokenizer)
        return [int(id) for id in self._text(rng, length) if id != end]


def common_ids(arrays: list[Ids], tokenizer: Tokenizer, count: int) -> Tensor:
    """The ``count`` ids that occur most in ``arrays``, in ascending order [count] int64.

    With all special ones and those of single bytes, by which all else can be written. A loss over
    these alone costs a third of that over SmolLM2's whole vocabulary.
    """
    size = tokenizer.vocab_size
    counts = np.zeros(size, np.int64)
    for ids in arrays:
        counts += np.bincount(ids, minlength=size)
    always = [id for id in range(size) if len(tokenizer.token_bytes(id)) <= 1]
    counts[[*always, *tokenizer.special_names]] += 1 << 40
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))
