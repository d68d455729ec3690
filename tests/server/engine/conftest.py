"""Every engine made by `make_engine` is checked at the end: free + held = total, nothing live."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from server.engine.engine import Engine
from tests.fakes import FakeRuntime
from tests.tiny import drain, tiny_engine


@pytest.fixture
def runtime() -> FakeRuntime | None:
    """Stands in for the native runtime; None for torch."""
    return None


@pytest.fixture
def make_engine(runtime: FakeRuntime | None) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**options: object) -> Engine:
        engines.append(tiny_engine(runtime=runtime, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        drain(engine)
        stats = engine.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.held_slots == stats.num_sessions
        engine.expire(1e12)
        assert engine.stats().held_slots == 0


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()
