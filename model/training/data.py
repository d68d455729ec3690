"""Texts as memory-mapped arrays of token ids, and the windows that training reads from them.

Every window is a pure function of the step, so an interrupted run continues with
the very tokens it would have read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.evaluation import DataError, documents
from model.tokenizer import Tokenizer

__all__ = ["DataError", "Source", "StreamBatches", "documents", "tokenize_file"]

#: Steps of the additive recurrence that spreads the pieces over the sources evenly.
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Source:
    """A text to train on; its tokens are read ``weight`` times as often as their number says."""

    path: Path
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Source:
        """``FILE`` or ``FILE:WEIGHT``. Raises `DataError` for a weight that is not above 0."""
        name, colon, number = text.rpartition(":")
        try:
            source = cls(Path(name), float(number)) if colon else cls(Path(text))
        except ValueError:
            source = cls(Path(text))
        if not 0.0 < source.weight < float("inf"):
            raise DataError(f"the weight of {source.path} must be above 0, not {number}")
        return source


def tokenize_file(file: Path, tokenizer: Tokenizer, cache: Path) -> NDArray[np.uint16]:
    """All documents, each followed by the end-of-text id, as a read-only memory map.

    The array is kept in the folder ``cache`` under a digest of its inputs. Ids
    are uint16, so a vocabulary has at most 65,536 of them.
    """
    if tokenizer.vocab_size > 1 << 16:
        raise DataError(f"the vocabulary of {tokenizer.vocab_size} ids does not fit 16 bits")
    digest = hashlib.sha256(tokenizer.digest.encode())
    digest.update(hashlib.sha256(file.read_bytes()).digest())
    path = cache / f"tokens-{digest.hexdigest()[:16]}.u16"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as out:
            for document in documents(file):
                ids = [*tokenizer.encode(document), tokenizer.eos_token_id]
                out.write(np.asarray(ids, dtype=np.uint16).tobytes())
        partial.rename(path)
    if path.stat().st_size == 0:
        raise DataError(f"{file}: no text to train on")
    return np.memmap(path, dtype=np.uint16, mode="r")


class Shuffled:
    """One source, read in pieces of ``length`` tokens, each epoch in another order.

    An epoch puts the documents in a random order, cuts them into pieces from a random place on,
    and reads the pieces in a random order.
    """

    def __init__(self, tokens: NDArray[np.uint16], end: int, length: int, seed: int) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed
        self.pieces_per_epoch = max(1, len(tokens) // length)
        ends = np.flatnonzero(tokens == end) + 1
        self._cuts = [0, *ends[ends < len(tokens)].tolist(), len(tokens)]
        self._epoch = lru_cache(maxsize=2)(self._shuffle)

    def read(self, piece: int, start: int, num_tokens: int) -> NDArray[np.int64]:
        """``num_tokens`` from place ``start`` of a piece on, counted over all epochs."""
        epoch, place = divmod(piece, self.pieces_per_epoch)
        tokens, shift, order = self._epoch(epoch)
        first = shift + order[place] * self.length + start
        index = (first + np.arange(num_tokens)) % len(tokens)
        ids: NDArray[np.int64] = tokens[index].astype(np.int64)
        return ids

    def _shuffle(self, epoch: int) -> tuple[NDArray[np.uint16], int, NDArray[np.int64]]:
        random = np.random.default_rng((self.seed, epoch))
        order = random.permutation(len(self._cuts) - 1)
        tokens = np.concatenate([self.tokens[self._cuts[i] : self._cuts[i + 1]] for i in order])
        shift = int(random.integers(len(tokens)))
        return tokens, shift, random.permutation(self.pieces_per_epoch)


class StreamBatches:
    """``batch_size`` streams; each reads a piece of ``stream_windows`` windows, then another.

    The rows begin their pieces at different steps, spread evenly. The sources take turns in
    proportion to their tokens times ``weights``; a piece that begins at ``final_from`` or later
    goes by ``final_weights``.
    """

    def __init__(
        self,
        tokens: Sequence[NDArray[np.uint16]],
        end: int,
        batch_size: int,
        window: int,
        stream_windows: int = 16,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        final_weights: Sequence[float] | None = None,
        final_from: int | None = None,
    ) -> None:
        if not tokens:
            raise DataError("there is no text to train on")
        for source in tokens:
            if len(source) <= window:
                raise DataError(f"{len(source)} tokens are too few for a window of {window}")
        self.batch_size, self.window, self.stream_windows = batch_size, window, stream_windows
        self._sources = [
            Shuffled(source, end, window * stream_windows, seed + 1000 * number)
            for number, source in enumerate(tokens)
        ]
        lengths = np.array([len(source) for source in tokens], dtype=np.float64)
        self._shares = _shares(lengths * (weights or 1.0))
        self._final_shares = _shares(lengths * (final_weights or weights or 1.0))
        self._final_from = final_from
        self._turns: list[tuple[int, int]] = []
        self._counts = [0] * len(tokens)
        self._first = float(np.random.default_rng(seed).random())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, each [batch_size, window] int64."""
        rows = []
        for row in range(self.batch_size):
            number, place = self._place(step, row)
            source, piece = self._turn(number * self.batch_size + row)
            start = place * self.window
            rows.append(self._sources[source].read(piece, start, self.window + 1))
        ids = torch.from_numpy(np.stack(rows))
        return ids[:, :-1], ids[:, 1:]

    def resets(self, step: int) -> Tensor:
        """[batch_size] bool: the rows that start step ``step`` from the empty state."""
        places = [self._place(step, row)[1] for row in range(self.batch_size)]
        return torch.tensor([step == 0 or place == 0 for place in places])

    def _place(self, step: int, row: int) -> tuple[int, int]:
        """Which of its pieces a row reads at a step, and which window of it."""
        return divmod(step + self._offset(row), self.stream_windows)

    def _offset(self, row: int) -> int:
        """Later rows begin later, so that pieces are numbered in the order of their beginnings."""
        return (self.batch_size - 1 - row) * self.stream_windows // self.batch_size

    def _turn(self, number: int) -> tuple[int, int]:
        """The source of the piece ``number``, all rows counted, and which of its pieces it is."""
        while len(self._turns) <= number:
            cycle, row = divmod(len(self._turns), self.batch_size)
            begins = cycle * self.stream_windows - self._offset(row)
            final = self._final_from is not None and begins >= self._final_from
            draw = (self._first + len(self._turns) * GOLDEN) % 1.0
            shares = self._final_shares if final else self._shares
            source = int(np.searchsorted(shares, draw, side="right"))
            self._turns.append((source, self._counts[source]))
            self._counts[source] += 1
        return self._turns[number]


def _shares(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where each source ends in [0, 1), the last at 1."""
    ends: NDArray[np.float64] = np.cumsum(sizes) / sizes.sum()
    ends[-1] = 1.0
    return ends
