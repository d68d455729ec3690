"""The short form of `tests.processors`; ``make processors`` runs the long one."""

from __future__ import annotations

import pytest

from tests.processors import ENVIRONMENTS, SHORT, run

pytestmark = pytest.mark.process


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_numerical_tests_pass_on_other_processors(name: str) -> None:
    assert run(ENVIRONMENTS[name], SHORT, "-n", "0") == 0
