from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model.ops.cpu.models import small_runtime


@pytest.fixture(scope="session", autouse=True)
def _runtimes_end_before_the_interpreter() -> Iterator[None]:
    yield
    small_runtime.cache_clear()
