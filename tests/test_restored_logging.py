from __future__ import annotations

import io
import logging

from server.observability.logs import CAUSED_BY_PEERS, configure
from tests.restored_logging import restored_logging


def test_configured_loggers_are_as_before() -> None:
    names = ("", "everstream", "uvicorn.error", *CAUSED_BY_PEERS)
    loggers = [logging.getLogger(name) for name in names]
    seen = []
    for _ in range(2):
        with restored_logging():
            seen.append([(one.level, list(one.filters), one.propagate) for one in loggers])
            configure("text", "error", stream=io.StringIO())
            assert logging.getLogger(CAUSED_BY_PEERS[0]).filters
    assert seen[0] == seen[1]
    assert not any(
        isinstance(one, logging.StreamHandler) and isinstance(one.stream, io.StringIO)
        for one in logging.root.handlers
    )
