"""One real server for all clients: the bundled model or the chosen one, keys, a store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.bundled_models import DEFAULT_NAME
from tests.chosen_model import chosen_model
from tests.reliability.servers import ServerProcess

#: Name of a key -> the rest of its table. The names of the keys are the keys.
KEYS = {
    "usual": 'scopes = ["generate", "sessions", "read"]',
    "reader": 'scopes = ["read"]',
    "limited": 'scopes = ["generate", "read"]\nlimits = { requests_per_minute = 60 }',
}


def serving(place: Path, *flags: object) -> ServerProcess:
    """A server with ``flags`` that keeps its keys and its store in ``place``.

    A stream has a comment wherever it is silent for a moment: no client may mind.
    """
    keys = place / "keys.toml"
    keys.write_text("".join(_table(name, rest) for name, rest in KEYS.items()))
    own = ("--keys-file", keys, "--store", place / "store")
    model = chosen_model()
    if model is not None and "--model" not in flags:
        own = (*own, "--model", f"{DEFAULT_NAME}={model}")
    return ServerProcess(*own, *flags, environment={"EVERSTREAM_HEARTBEAT_S": "0.01"})


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("compat")) as started:
        yield started


@pytest.fixture(scope="session")
def environment(server: ServerProcess) -> dict[str, str]:
    """What a check needs to know, and the words that keep clients off the network."""
    return {
        "EVERSTREAM_URL": server.url,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


@pytest.fixture
def long(request: pytest.FixtureRequest) -> None:
    """Skips what has hundreds of megabytes to install, but in the long form."""
    if not request.config.getoption("--long"):
        pytest.skip("installs hundreds of megabytes: `make compat`, or --long")


def _table(name: str, rest: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f'[[key]]\nname = "{name}"\nhash = "sha256:{digest}"\n{rest}\n\n'
