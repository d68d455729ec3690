"""A cluster starts, or says why it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cluster import cluster_of
from tests.reliability.servers import ServerProcess
from tests.tiny import write_model


async def test_replica_that_takes_no_work_at_first_is_up_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the database is slow, a replica that has just started answers 503 for a while."""
    takes_work, asked = ServerProcess.takes_work, set[int]()

    def later(server: ServerProcess) -> bool:
        is_first = server.pid not in asked
        asked.add(server.pid)
        return not is_first and takes_work(server)

    monkeypatch.setattr(ServerProcess, "takes_work", later)
    model = write_model(tmp_path / "model")
    async with cluster_of(model, num_replicas=2, wires="direct") as started:
        assert all(replica.is_up for replica in started.replicas)
        assert not any(replica.exits for replica in started.replicas)


async def test_replicas_that_do_not_start_are_reported_with_their_logs(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"(?s)replica 1: \d+ starts.*replica 2: \d+ starts"):
        async with cluster_of(tmp_path / "no model", num_replicas=2, wires="direct", start_s=0.1):
            pass
