"""1, across replicas: kill -9 at random moments. Others continue without a gap or a repeat."""

from __future__ import annotations

import pytest

from tests.chaos.report import as_markdown
from tests.chaos.run import Plan, chaos


@pytest.mark.timeout(900)
async def test_every_transcript_is_whole_after_kills_of_replicas(long: bool) -> None:
    """Sockets and server-sent events; one replica at a time, and all of them at once."""
    num_faults, num_clients = (40, 100) if long else (3, 24)
    plan = Plan(
        seed=11,
        seconds=600,
        num_clients=num_clients,
        kinds=["kill", "kill", "kill", "kill all"],
        max_faults=num_faults,
        wires="direct",
    )
    verdict = await chaos(plan)
    assert verdict.is_good, as_markdown(verdict)
    assert len(verdict.faults) == num_faults
    assert verdict.waits.seconds["kill"], "no reader met a kill"
