"""Faults come from the seed alone, each kind in its turn, some of them two at a time."""

from __future__ import annotations

import random
from itertools import islice, pairwise

from tests.chaos.faults import KINDS, Fault, schedule

NUM = 40 * len(KINDS)


def drawn(seed: int) -> list[Fault]:
    return [*islice(schedule(random.Random(seed), num_replicas=3, lease_s=3.0), NUM)]


def test_seed_determines_the_schedule() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_each_kind_occurs_before_any_repeats() -> None:
    kinds = [fault.kind for fault in drawn(1)]
    rounds = [sorted(kinds[start : start + len(KINDS)]) for start in range(0, NUM, len(KINDS))]
    assert rounds == [sorted(KINDS)] * 40


def test_at_most_two_faults_at_a_time_leave_a_replica_running() -> None:
    pairs = [(one, other) for one, other in pairwise(drawn(1)) if other.overlaps]
    assert len(pairs) > 40
    for one, other in pairs:
        assert not one.overlaps
        assert {one.kind, other.kind}.isdisjoint({"kill all", "store empty"})
        if one.is_of_one and other.is_of_one:
            assert one.replica != other.replica
        else:
            assert one.is_of_one != other.is_of_one
