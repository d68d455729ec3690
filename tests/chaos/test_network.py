"""A cut wire carries nothing until it is repaired."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from tests.chaos.network import Network, ReachablePostgres, Wires, can_have_namespaces, network_of

ASK = """
import sys, psycopg
try:
    with psycopg.connect(sys.argv[1], connect_timeout=int(sys.argv[2])) as connection:
        print(connection.execute("SELECT 7").fetchone()[0])
except psycopg.OperationalError:
    print("nothing")
"""

KINDS: list[Wires] = ["namespaces", "proxies"]


@pytest.fixture(params=KINDS)
async def network(request: pytest.FixtureRequest) -> AsyncIterator[Network]:
    if request.param == "namespaces" and not can_have_namespaces():
        pytest.skip("only root may make network namespaces")
    postgres = ReachablePostgres()
    try:
        async with network_of(postgres, 2, request.param) as network:
            postgres.start()
            yield network
    finally:
        postgres.close()


async def answer_to(network: Network, replica: int, timeout_s: int = 60) -> str:
    """What the store says to a question from where the replica is."""
    command = [*network.within(replica), sys.executable, "-c", ASK]
    command += [network.store_url(replica, "postgres"), str(timeout_s)]
    done = await asyncio.to_thread(
        lambda: subprocess.run(command, capture_output=True, text=True, check=True)
    )
    return done.stdout.strip()


async def test_cut_affects_one_replica_and_can_be_undone(network: Network) -> None:
    assert [await answer_to(network, index) for index in range(2)] == ["7", "7"]
    network.cut(0, "store")
    assert await answer_to(network, 0, timeout_s=2) == "nothing"
    assert await answer_to(network, 1) == "7"
    network.repair(0, "store")
    assert [await answer_to(network, index) for index in range(2)] == ["7", "7"]
