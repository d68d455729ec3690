"""An engine of ours with sessions, without a server, a store or a clock around it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from server.engine.engine import Engine, EngineConfig
from server.engine.types import Request, SamplingParams
from server.models.backend import Backend

OWNER = "benchmark"
MAX_REQUESTS = 512


class Probe:
    """An engine whose sessions are fed and generate step by step.

    ``config`` has values of `EngineConfig` other than the default.
    """

    def __init__(self, backend: Backend, num_slots: int, **config: Any) -> None:
        names = itertools.count()
        self._numbers = itertools.count()
        limits = {"max_running": MAX_REQUESTS, "max_waiting": MAX_REQUESTS, **config}
        settings = EngineConfig(new_id=lambda: f"session-{next(names)}", **limits)
        self.engine: Engine = backend.engine(num_slots, settings)
        self._vocabulary = range(backend.tokenizer.vocab_size)
        self._draw = random.Random(0)

    @property
    def state_bytes(self) -> int:
        return self.engine.stats().state_bytes_per_session

    def open(self) -> str:
        """A new session."""
        return self.engine.kept.create(OWNER, now=0.0).session

    def close(self, session: str) -> None:
        self.engine.kept.delete(session, OWNER)

    def text(self, num_tokens: int) -> Sequence[int]:
        """Random ids."""
        return self._draw.choices(self._vocabulary, k=num_tokens)

    def submit(
        self, session: str, tokens: Sequence[int] = (), sampling: SamplingParams | None = None
    ) -> None:
        """A request of ``session``: tokens to read, and to generate where ``sampling`` says so."""
        request_id = f"request-{next(self._numbers)}"
        request = Request(request_id, OWNER, tuple(tokens), sampling, session, True, False)
        self.engine.submit(request, now=0.0)

    def drain(self) -> None:
        """Runs every request to its end."""
        while self.engine.has_work():
            self.engine.step(now=0.0)
