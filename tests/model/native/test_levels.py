"""What is said where the extension module was compiled on another processor."""

from __future__ import annotations

import pytest

from model.native.runtime import COMPILE_HERE, better_level, why_none_runs

V4 = ("v4", "v3", "v2")


@pytest.mark.parametrize("built", [("v4",), ("v4dot", "v4", "v3", "v2")])
def test_nothing_is_said_where_the_best_level_was_compiled(built: tuple[str, ...]) -> None:
    assert why_none_runs(built, V4) is None
    assert better_level(built, V4) is None


def test_lower_level_runs_and_the_better_one_is_named() -> None:
    assert why_none_runs(("v3",), V4) is None
    assert better_level(("v3",), V4) == (
        f"the native runtime runs v3, without kernels for v4; {COMPILE_HERE}"
    )


@pytest.mark.parametrize(("processor", "best"), [(V4[1:], "v3"), ((), "none of the levels")])
def test_module_without_a_level_that_runs_says_what_to_do(
    processor: tuple[str, ...], best: str
) -> None:
    assert why_none_runs(("v4dot", "v4"), processor) == (
        f"it was compiled for v4dot, v4, and this processor has {best}; {COMPILE_HERE}"
    )
