"""Every engine made by `make_engine` is checked at the end: free + held = total, nothing live."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from model.native.runtime import Runtime
from server.engine.engine import Engine
from tests.fakes import FakeRuntime
from tests.requirements import needs_native
from tests.server.engine.grammars import EOS, VOCAB_SIZE, FakeMatchers
from tests.tiny import check_books, drain, tiny_engine, tiny_runtime


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)])
def backend(request: pytest.FixtureRequest) -> Runtime | None:
    """A file's own ``runtime`` that returns this runs each of its tests on both, in earnest."""
    return tiny_runtime() if request.param == "native" else None


@pytest.fixture
def runtime() -> FakeRuntime | None:
    """Stands in for the native runtime; None for torch."""
    return None


@pytest.fixture
def matchers() -> FakeMatchers:
    return FakeMatchers(VOCAB_SIZE, EOS)


@pytest.fixture
def make_engine(runtime: FakeRuntime | Runtime | None) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**options: object) -> Engine:
        engines.append(tiny_engine(**{"runtime": runtime, **options}))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        drain(engine)
        stats = engine.stats()
        assert stats.num_running == stats.num_waiting == stats.num_parked == 0
        check_books(engine)
        engine.expire(1e12)
        stats = engine.stats()
        assert stats.held_slots == stats.num_sessions == stats.num_asleep == 0


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()
