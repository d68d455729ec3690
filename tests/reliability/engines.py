"""Engines for the proofs that need no server: tiny models on torch and on the native runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from server.engine.engine import Engine
from tests.chosen_model import CHOSEN, chosen_engine
from tests.requirements import needs_native
from tests.tiny import check_books, drain, tiny_engine, tiny_runtime

BACKENDS = ["torch", pytest.param("native", marks=needs_native)]


@dataclass(frozen=True)
class Model:
    """A tiny model, or the chosen one, and what runs it."""

    backend: Literal["torch", "native"]
    attention: str = "gated"

    def engine(self, **options: Any) -> Engine:
        if self.attention == CHOSEN:
            return chosen_engine(self.backend, **options)
        runtime = tiny_runtime(self.attention) if self.backend == "native" else None
        return tiny_engine(self.attention, runtime=runtime, **options)


def check_baseline(engine: Engine) -> None:
    """No request, no session and no slot is left once all have had their time."""
    drain(engine)
    check_books(engine)
    engine.expire(1e12)
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == stats.num_parked == 0
    assert stats.held_slots == stats.num_sessions == stats.num_asleep == 0
