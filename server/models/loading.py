"""What is shown while the weights of a large model are loaded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

logger = logging.getLogger("everstream.loading")

#: Weights of which nothing is shown: they load in a second or so.
FEW = 100_000_000

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
