"""Loggers belong to the process: what a command that configures them changes is undone after it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from server.observability.logs import CAUSED_BY_PEERS, QUIET

#: Those that `server.observability.logs.configure` changes.
NAMES = ("", "everstream", "uvicorn.access", *CAUSED_BY_PEERS, *QUIET)


@contextmanager
def restored_logging() -> Iterator[None]:
    """On the way out each logger has its level, filters, propagation and handlers back."""
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(one.level, list(one.filters), list(one.handlers), one.propagate) for one in loggers]
    yield
    for logger, (level, filters, handlers, propagate) in zip(loggers, before, strict=True):
        if logger.level != level:  # setting it goes through all loggers of the process
            logger.setLevel(level)
        logger.filters[:] = filters
        logger.propagate = propagate
        for handler in set(logger.handlers) - set(handlers):
            logger.removeHandler(handler)
