"""The limits of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from server.engine.drafter import Drafter
from server.engine.matcher import Matcher

#: Bytes of requests for each of those that may run or wait, on average: some 40,000 ids.
REQUEST_BYTES = 1 << 19


@dataclass(frozen=True)
class EngineConfig:
    """Limits, all fixed at start. ``new_id`` names sessions: unguessable in production.

    ``max_asleep`` hibernated sessions fit next to the pool. With ``can_evict`` a store takes
    those that have been idle for longest, or for ``session_ttl_s``, or where the states of all
    have more than ``max_asleep_bytes``; otherwise those of ``session_ttl_s`` are deleted. A kept
    session is saved every ``save_interval`` tokens, and parks ``max_detached_tokens`` after its
    client has left. ``matchers`` makes one of a grammar's text, at its beginning; without it
    grammars are refused. With a ``drafter`` a step may draw several tokens of a request; not on a
    runner that has a grid.
    """

    new_id: Callable[[], str]
    max_running: int = 256
    max_waiting: int = 1024
    max_asleep: int = 0
    max_asleep_bytes: float = math.inf
    session_ttl_s: float = 900.0
    can_evict: bool = False
    save_interval: int = 1024
    max_detached_tokens: int = 4096
    max_prefixes: int = 0
    max_prefix_bytes: float = math.inf
    max_evicted_prefixes: int = 0
    matchers: Callable[[str], Matcher] | None = None
    drafter: Drafter | None = None

    @property
    def max_request_bytes(self) -> int:
        """Of all requests that have not ended; an owner may have half of them."""
        return (self.max_running + self.max_waiting) * REQUEST_BYTES
