from __future__ import annotations

import asyncio
from typing import cast

import pytest

from server.api.connections import SPARE, ConnectionTable, OpenConnection, address_of


class Transport:
    """What the table asks of a transport."""

    def __init__(self, unsent_bytes: int = 0) -> None:
        self.is_aborted = False
        self.unsent_bytes = unsent_bytes

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes


def opened(table: ConnectionTable, address: str = "a", unsent: int = 0) -> OpenConnection:
    connection = table.add(address)
    assert connection is not None
    connection.made(cast(asyncio.Transport, Transport(unsent)))
    return connection


def is_aborted(connection: OpenConnection) -> bool:
    return cast(Transport, connection.transport).is_aborted


def test_silent_connections_count_from_their_accept_to_their_end() -> None:
    table = ConnectionTable(2)
    all_open = [opened(table) for _ in range(2 + SPARE)]
    assert not table.has_room
    all_open[0].lost()
    all_open[0].lost()
    assert table.has_room
    assert table.num_open == 1 + SPARE


def test_longest_idle_connection_is_closed_first_and_none_with_a_request() -> None:
    table = ConnectionTable(2)
    first, second, third = (opened(table) for _ in range(3))
    assert table.admit("a", first)
    assert table.close_longest_idle()
    assert [is_aborted(each) for each in (first, second, third)] == [False, True, False]
    table.release("a", first)
    assert table.close_longest_idle()
    assert [is_aborted(each) for each in (first, second, third)] == [False, True, True]
    assert table.close_longest_idle()
    assert is_aborted(first)
    assert not table.close_longest_idle()


def test_connection_that_still_sends_its_answer_is_closed_after_others() -> None:
    table = ConnectionTable(2)
    sending, silent = opened(table, unsent=1), opened(table)
    assert table.close_longest_idle()
    assert (is_aborted(sending), is_aborted(silent)) == (False, True)
    assert table.close_longest_idle()
    assert is_aborted(sending)


def test_one_address_closes_its_own_connections_only() -> None:
    table = ConnectionTable(50, max_per_address=1)
    other = opened(table, "b")
    of_one = [opened(table) for _ in range(1 + SPARE)]
    assert table.admit("a", of_one[0])
    opened(table)
    assert [is_aborted(each) for each in of_one] == [False, True, *[False] * (SPARE - 1)]
    assert not is_aborted(other)
    assert not table.admit("a", of_one[2])
    assert table.admit("b", other)


def test_address_whose_connections_are_not_set_up_yet_gets_no_more() -> None:
    table = ConnectionTable(50, max_per_address=1)
    assert all(table.add("a") for _ in range(1 + SPARE))
    assert table.add("a") is None
    assert table.add("b") is not None


def test_requests_count_also_where_connections_do_not() -> None:
    table = ConnectionTable(1)
    assert table.admit("a", None)
    assert not table.admit("b", None)
    table.release("a", None)
    assert table.admit("b", None)


def test_refused_addresses_take_no_memory() -> None:
    table = ConnectionTable(1)
    assert table.admit("a", None)
    assert not any(table.admit(f"b{number}", None) for number in range(100))
    assert vars(table)["_by_address"].keys() == {"a"}


def test_connection_that_ends_within_its_request_stays_out() -> None:
    table = ConnectionTable(1)
    connection = opened(table)
    assert table.admit("a", connection)
    connection.lost()
    table.release("a", connection)
    assert not table.close_longest_idle()
    assert table.num_open == 0


def test_one_address_cannot_take_the_requests_of_all() -> None:
    table = ConnectionTable(4, max_per_address=2)
    assert [table.admit("a", None) for _ in range(3)] == [True, True, False]
    assert [table.admit("b", None) for _ in range(3)] == [True, True, False]
    assert not table.admit("c", None)  # that is all of the four
    table.release("a", None)
    assert table.admit("a", None)


def test_without_a_bound_one_address_may_have_all() -> None:
    table = ConnectionTable(3)
    assert [table.admit("a", None) for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("", "", True),
    ],
)
def test_addresses_of_one_client_are_one(one: str, other: str, same: bool) -> None:
    assert (address_of(one) == address_of(other)) == same
