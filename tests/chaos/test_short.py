"""The short form of ``make chaos``: seeds that are always the same, and every kind of fault."""

from __future__ import annotations

import pytest

from tests.chaos.faults import KINDS, Kind
from tests.chaos.report import as_markdown
from tests.chaos.run import Plan, chaos

#: Each run has a part of the kinds, so that all come within a minute.
SEEDS: list[tuple[int, list[Kind]]] = [
    (1, ["kill", "drain", "stop past lease", "kill all"]),
    (2, ["cut from store", "store killed", "store empty", "kill"]),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "kinds"), SEEDS, ids=[str(seed) for seed, _ in SEEDS])
async def test_every_promise_is_kept(seed: int, kinds: list[Kind], long: bool) -> None:
    if long:
        plan = Plan(seed, seconds=180, kinds=KINDS)
    else:
        plan = Plan(seed, seconds=120, kinds=kinds, max_faults=len(kinds), num_clients=16)
    verdict = await chaos(plan, print)
    assert verdict.is_good, as_markdown(verdict)
    assert len(verdict.faults) >= len(kinds)
    assert verdict.counts["sessions read to their end"] > 0
