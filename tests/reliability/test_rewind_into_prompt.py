"""A long text that was appended at once, then edited, with ``kill -9`` between the two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clients.python import Client, Session, Token
from tests.postgres import Postgres
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.tiny import write_model

IDS = np.random.default_rng(0).integers(1, 250, 1000).tolist()
ENVIRONMENT = {"EVERSTREAM_SAVE_INTERVAL_TOKENS": "256"}

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose sessions say by their bytes how much of the text their states have seen."""
    return write_model(tmp_path_factory.mktemp("model"), attention="qwen35")


@pytest.fixture(params=["folder", pytest.param("shared", marks=pytest.mark.database)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "store")
    postgres: Postgres = request.getfixturevalue("postgres")
    return postgres.new_database()


def edited(session: Session, at: int, other: list[int]) -> list[int]:
    """What is generated after ``other`` tokens follow the first ``at``."""
    session.rewind(at)
    return continued(session, other)


def continued(session: Session, other: list[int]) -> list[int]:
    session.append(other)
    stream = session.generate(max_tokens=8, temperature=0.0, ignore_eos=True)
    return [event.token_id for event in stream if isinstance(event, Token)]


@pytest.mark.parametrize("past", ["stop", "slide"])
def test_edits_continue_from_saves_within_the_text(model: Path, store: str, past: str) -> None:
    context = "2048" if past == "stop" else "256"
    flags = ("--model", model, "--store", store, "--context", context, "--past", past)
    with ServerProcess(*flags, environment=ENVIRONMENT) as server:
        with Client(server.url, timeout_s=STUCK_S) as client:
            session = client.create_session()
            session.append(IDS)
            size = session.info().state_bytes
            session.rewind(900)
            assert session.info().state_bytes > 0.7 * size
            session.append(IDS[:16])
        server.kill()
        server.start()
        with Client(server.url, timeout_s=STUCK_S) as client:
            session = client.session(session.id)
            found = [continued(session, IDS[16:20]), edited(session, 905, IDS[30:40])]
            found.append(edited(session, 850, IDS[50:60]))
            fresh = client.create_session()
            fresh.append(IDS[:850])
            wanted = [continued(fresh, IDS[50:60])]
            for parts in ((IDS[:5], IDS[30:40]), (IDS[:16], IDS[16:20])):
                fresh = client.create_session()
                fresh.append(IDS[:900])
                fresh.append(parts[0])
                wanted.insert(0, continued(fresh, parts[1]))
            assert found == wanted
