"""The processes that tests start: their ports, and when they count as started."""

from __future__ import annotations

import pytest

from tests.reliability.servers import FAKE, STUCK_S, ServerProcess

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


class Late(ServerProcess):
    """As one whose store does not answer: it says 503, and 200 soon after."""

    def __init__(self) -> None:
        super().__init__(program=FAKE)
        self.statuses: list[int] = []

    def get(self, path: str, timeout_s: float = STUCK_S) -> tuple[int, str]:
        self.statuses.append(503 if len(self.statuses) < 3 else super().get(path, timeout_s)[0])
        return self.statuses[-1], ""


def test_start_waits_for_a_server_that_takes_no_work_yet() -> None:
    with Late() as server:
        assert server.statuses == [503, 503, 503, 200]


def test_end_of_a_server_that_starts_is_an_error_with_its_log() -> None:
    server = ServerProcess("--no-such-flag", program=FAKE)
    with pytest.raises(AssertionError, match=r"(?s)did not start.*--no-such-flag"):
        server.start()
    server.close()
