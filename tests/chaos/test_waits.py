"""Take-over times are from the last event of one connection to the first of the next."""

from __future__ import annotations

from tests.chaos.waits import UNBROKEN_S, Waits, percentile


def struck(kind: str = "kill") -> Waits:
    """A fault at second 1 on the first connection of the client ``c``."""
    waits = Waits()
    waits.struck(kind, "c", "first", 1.0)
    return waits


def test_wait_is_from_the_last_buffered_event_to_the_next_connection() -> None:
    waits = struck()
    waits.event("c", "first", 3.0)
    waits.event("c", "second", 3.25)
    waits.event("c", "second", 3.5)
    assert waits.seconds == {"kill": [0.25]}


def test_two_faults_in_one_wait_are_counted_apart() -> None:
    waits = struck()
    waits.struck("drain", "c", "first", 2.0)
    waits.event("c", "second", 4.0)
    assert waits.seconds == {"several": [3.0]}


def test_fault_without_a_disconnect_or_with_a_lost_session_is_no_wait() -> None:
    waits = struck("stop briefly")
    waits.over("stop briefly", 2.0, counts_from_now=False)
    waits.event("c", "first", 2.0 + 2 * UNBROKEN_S)
    waits.event("c", "second", 9.0)
    assert waits.num_unbroken == {"stop briefly": 1}
    lost = struck("store empty")
    lost.left("c")
    lost.event("c", "second", 5.25)
    assert waits.seconds == lost.seconds == {}


def test_wait_for_a_store_begins_when_it_is_back() -> None:
    waits = struck("store away")
    waits.over("store away", 5.0, counts_from_now=True)
    waits.event("c", "second", 5.25)
    assert waits.seconds == {"store away": [0.25]}


def test_percentile_is_the_value_that_so_many_do_not_exceed() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (50, 99, 100)] == [50.0, 99.0, 100.0]
    assert percentile([3.0], 99) == 3.0
