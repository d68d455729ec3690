"""The two clients have the same methods with the same arguments."""

from __future__ import annotations

import inspect

import pytest

from clients.python import (
    AsyncClient,
    AsyncGeneration,
    AsyncSession,
    Client,
    Generation,
    Session,
)

ASYNC_NAMES = {"__aenter__": "__enter__", "__aexit__": "__exit__"}
ASYNC_NAMES |= {"__aiter__": "__iter__", "__anext__": "__next__"}


def signatures(kind: type) -> dict[str, list[str]]:
    """The arguments of each method that callers use, with their types and defaults."""
    return {
        ASYNC_NAMES.get(name, name): [str(p) for p in inspect.signature(member).parameters.values()]
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and (name in ASYNC_NAMES or not name.startswith("_"))
    }


@pytest.mark.parametrize(
    ("plain", "twin"),
    [(Client, AsyncClient), (Generation, AsyncGeneration), (Session, AsyncSession)],
    ids=["client", "generation", "session"],
)
def test_twins_do_not_drift(plain: type, twin: type) -> None:
    expected = signatures(twin)
    assert len(expected) > 4
    for name, arguments in expected.items():
        member = inspect.signature(getattr(plain, name)).parameters.values()
        assert [str(p) for p in member] == arguments, name
    assert signatures(plain).keys() <= expected.keys()
