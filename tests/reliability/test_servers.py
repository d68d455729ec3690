"""The processes that tests start: their ports."""

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
