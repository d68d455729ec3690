"""Open files: how many this process may have, and how many of them may be connections."""

from __future__ import annotations

import contextlib
import logging
import resource

from server.api.middleware.connections import DEFAULT_MAX_CONNECTIONS, SPARE
from server.config.settings import ServerConfig

logger = logging.getLogger("everstream.connections")

#: More than any setting makes use of.
ENOUGH = 65_536
#: What macOS allows at most, whatever its hard limit says.
ENOUGH_ON_MACOS = 10_240
#: Kept from connections: for logs, child processes and databases, and for each model's store.
RESERVE = 48
RESERVE_PER_MODEL = 16


def raise_limit() -> int:
    """Raises the soft limit on open files as far as the hard one allows; returns what it is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (ENOUGH, ENOUGH_ON_MACOS):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft < target:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def with_fitting_connections(config: ServerConfig) -> ServerConfig:
    """``config`` with a bound on connections that the process's limit on open files allows."""
    limit = raise_limit()
    reserve = RESERVE + RESERVE_PER_MODEL * len(config.model)
    asked = config.max_connections or DEFAULT_MAX_CONNECTIONS
    fitting = max(1, min(asked, limit - reserve - SPARE))
    if fitting < asked:
        logger.warning("at most %d connections: %d open files are allowed", fitting, limit)
    return config.model_copy(update={"max_connections": fitting})
