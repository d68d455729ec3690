"""The processes that tests start: their ports, and when they count as started."""

from __future__ import annotations

import pytest

from tests.reliability.servers import FAKE, ServerProcess

pytestmark = pytest.mark.process


def test_port_is_known_before_the_start_and_kept_by_every_successor() -> None:
    server = ServerProcess(program=FAKE)
    try:
        port = server.port
        for _ in range(2):
            server.restart()
            assert server.port == port
            assert server.get("/health")[0] == 200
    finally:
        server.close()


def test_start_waits_for_a_server_that_takes_no_work_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose store does not answer: it says 503, and 200 soon after."""
    server = ServerProcess(program=FAKE)
    get, statuses = server.get, []

    def late(path: str, timeout_s: float) -> tuple[int, str]:
        statuses.append(503 if len(statuses) < 3 else get(path, timeout_s)[0])
        return statuses[-1], ""

    monkeypatch.setattr(server, "get", late)
    with server:
        assert statuses == [503, 503, 503, 200]


def test_end_of_a_server_that_starts_is_an_error_with_its_log() -> None:
    server = ServerProcess("--no-such-flag", program=FAKE)
    with pytest.raises(AssertionError, match=r"(?s)did not start.*--no-such-flag"):
        server.start()
    server.close()
