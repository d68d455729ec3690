"""The loading of weights: its progress is shown, and numbers that no training leaves are reported.

A file may be whole and its numbers broken all the same, by a conversion or on the disk where it
was trained. The model then loads, and writes nonsense or nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

import numpy as np

from model.tensor_spec import Shape
from model.weights import Array, StoredWeights, shape_in
from model.weights.gguf_kinds import block_scales

logger = logging.getLogger("everstream.loading")

#: Weights of which nothing is shown: they load in a second or so.
FEW = 100_000_000

NOT_FINITE = "has numbers that are not finite"
ZEROS = "is the weight of a norm and is zero everywhere"

Progress = Callable[[int], None]


@contextmanager
def loading(num_weights: int, stream: TextIO | None = None) -> Iterator[Progress]:
    """Gives a function to call with how many of ``num_weights`` have been read.

    It shows a bar where ``stream``, by default standard error, is a terminal; else it logs a
    line per quarter.
    """
    stream = stream or sys.stderr
    if num_weights <= FEW:
        yield lambda num_read: None
    elif stream.isatty():
        with _bar(num_weights, stream) as progress:
            yield progress
    else:
        yield _lines(num_weights)


@contextmanager
def _bar(num_weights: int, stream: TextIO) -> Iterator[Progress]:
    from rich import progress
    from rich.console import Console

    with progress.Progress(console=Console(file=stream)) as bar:
        task = bar.add_task("loading the weights", total=num_weights)
        yield lambda num_read: bar.update(task, completed=num_read)


def _lines(num_weights: int) -> Progress:
    shown = 0

    def progress(num_read: int) -> None:
        nonlocal shown
        quarters = min(4, 4 * num_read // num_weights)
        if quarters > shown:
            shown = quarters
            logger.info("loading the weights: %d%%", 25 * quarters)

    return progress


class WatchedWeights(StoredWeights):
    """``weights``, of which each tensor is looked at when it is read."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self._weights = weights
        self._found: dict[str, str] = {}

    def log(self, logger: logging.Logger) -> None:
        """Warns of what was found in those that were read, with the name of the first tensor."""
        for name, what in list(self._found.items())[:1]:
            more = f" ({len(self._found)} such tensors)" if len(self._found) > 1 else ""
            logger.warning("%s %s%s: the model's file may be damaged", name, what, more)

    def __getitem__(self, name: str) -> Array:
        return self._seen(name, self._weights[name])

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        if isinstance(self._weights, StoredWeights):
            return self._seen(name, self._weights.rows(name, begin, end))
        return self._seen(name, self._weights[name][begin:end])

    def _seen(self, name: str, rows: Array) -> Array:
        """One pass: the sum of squares is finite and not zero in a good tensor."""
        with np.errstate(all="ignore"):
            flat = rows.reshape(-1)
            squares = np.dot(flat, flat)
        if not np.isfinite(squares) and not np.isfinite(flat).all():
            self._found[name] = NOT_FINITE
        elif squares == 0 and "norm" in name and name.endswith("weight") and not flat.any():
            self._found[name] = ZEROS
        return rows

    def block_kind(self, name: str) -> str | None:
        if isinstance(self._weights, StoredWeights):
            return self._weights.block_kind(name)
        return None

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        """See `StoredWeights`; numbers are finite where their scales are."""
        assert isinstance(self._weights, StoredWeights), name
        rows, kind = self._weights.blocks(name, begin, end), self.block_kind(name)
        assert kind is not None, name
        self._seen(name, block_scales(rows, kind))
        return rows

    def release(self) -> None:
        if isinstance(self._weights, StoredWeights):
            self._weights.release()

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def shape(self, name: str) -> Shape:
        return shape_in(self._weights, name)

    def is_float(self, name: str) -> bool:
        if isinstance(self._weights, StoredWeights):
            return self._weights.is_float(name)
        return self._weights[name].dtype.kind == "f"

    @property
    def stored_dtype(self) -> str:
        if isinstance(self._weights, StoredWeights):
            return self._weights.stored_dtype
        return "float32"

    def dtype_of(self, name: str) -> str:
        if isinstance(self._weights, StoredWeights):
            return self._weights.dtype_of(name)
        return "float32"
