"""Settings of every test, made before torch is imported."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

import tests.own_tree.sitecustomize  # noqa: F401 - before anything of ours is imported
from tests.empty_home import EmptyHome, is_worker
from tests.needs import Guard, mark
from tests.postgres import Postgres
from tests.restored_logging import restored_logging

# Tiny models gain nothing from a second thread and lose much next to another busy process.
# Child processes inherit it; tests about threads set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A server that a test starts must not meet the user's own sessions; tests of stores name theirs.
os.environ["EVERSTREAM_STORE"] = "memory"
# How many tokens are drafted depends on times; tests of drafts turn them on.
os.environ["EVERSTREAM_SPECULATION"] = "off"
# Requests to this machine go through no proxy that the user has.
DIRECT = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
DIRECT = ",".join(filter(None, (DIRECT, "127.0.0.1,localhost")))
os.environ["NO_PROXY"] = os.environ["no_proxy"] = DIRECT

# How long an example takes says how busy the machine is, and no more.
settings.register_profile(
    "busy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("busy"), max_examples=10)
settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="run the long form of the proofs in tests/reliability"
    )


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests of processes wait about as long as they compute."""
    return (os.cpu_count() or 1) + 1


GUARD = pytest.StashKey[Guard]()
# Before anything reads it: a module that a test imports may look for its cache at once.
HOME = None if is_worker() else EmptyHome(os.environ)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[GUARD] = Guard()


def pytest_unconfigure() -> None:
    if HOME is not None:
        HOME.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What collecting makes stays, and is a million objects that no later search looks through."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark(items)
    # Ten seconds of a core each: as the last ones they would leave the other cores idle.
    items.sort(key=lambda item: item.path.name != "test_processors.py")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[GUARD].begin()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    item.config.stash[GUARD].check(item)


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """The order of tests decides nothing about what is logged, or read as logged."""
    with restored_logging():
        yield


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether this run has the time for every case."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One for all tests of a process, which is there again whatever a test does to it."""
    server = Postgres()
    try:
        server.start()
        yield server
    finally:
        server.close()
