"""What unfinished requests may hold: ids of four bytes, and a bound on all and on each owner."""

from __future__ import annotations

import sys

import pytest

from server.engine.limits import REQUEST_BYTES
from server.engine.session import Accepted
from server.engine.text import TokenArray
from server.engine.types import PROMPT_ID_BYTES, Request
from server.errors import QueueFull
from server.store.codec import pack_entries, unpack_entries
from tests.fakes import FakeEngine

#: Of a request that is somewhat more than a third of what all may have.
NUM_IDS = REQUEST_BYTES * 2 * 3 // 8 // PROMPT_ID_BYTES


def feeding(id: str, owner: str, num_ids: int = NUM_IDS) -> Request:
    return Request(id, owner, TokenArray([0] * num_ids), sampling=None)


def test_id_takes_four_bytes() -> None:
    small, large = TokenArray(), TokenArray(range(100_000))
    assert sys.getsizeof(large.copied()) - sys.getsizeof(small.copied()) == 400_000
    assert large.numbers.nbytes == 400_000


def test_array_is_equal_to_the_sequence_that_it_was_made_of() -> None:
    ids = TokenArray((1, 2, 3))
    assert ids == (1, 2, 3) == ids
    assert ids == [1, 2, 3]
    assert ids != (1, 2)
    assert ids != (1, 2, 4)
    assert ids[1:] == (2, 3)
    assert (ids[0], ids[-1], list(ids), "2" in repr(ids)) == (1, 3, [1, 2, 3], False)
    assert TokenArray.joined((), ids) is ids
    assert TokenArray.joined((7,), ids) == (7, 1, 2, 3)
    for bad in (-1, 1 << 32):
        with pytest.raises(OverflowError):
            TokenArray((bad,))


def test_log_has_the_ids_as_before_and_gives_them_back_as_an_array() -> None:
    plain, held = (1, 2, 3), TokenArray((1, 2, 3))
    logged = [
        pack_entries([Accepted(Request("r", "a", ids, None), ids, 0, 0)], None)
        for ids in (plain, held)
    ]
    assert logged[0] == logged[1]
    (entry,) = unpack_entries(logged[0], None)
    assert isinstance(entry, Accepted)
    assert [type(ids) for ids in (entry.tokens, entry.request.tokens)] == [TokenArray] * 2
    assert entry.tokens == plain


def test_owner_has_half_and_all_have_a_bound_until_requests_end() -> None:
    engine = FakeEngine(max_running=2, max_waiting=0)
    engine.submit(feeding("1", "a"), 0.0)
    with pytest.raises(QueueFull, match="this tenant"):
        engine.submit(feeding("2", "a"), 0.0)
    engine.cancel("1")
    engine.step(0.0)
    assert engine.take_freed_bytes() == NUM_IDS * PROMPT_ID_BYTES
    engine.submit(feeding("3", "a"), 0.0)
    engine.submit(feeding("4", "b"), 0.0)
    for id in ("3", "4"):
        engine.cancel(id)
    engine.step(0.0)
    assert engine.take_freed_bytes() == 2 * NUM_IDS * PROMPT_ID_BYTES


def test_all_owners_together_have_a_bound_and_small_requests_of_others_fit() -> None:
    engine = FakeEngine(max_running=4, max_waiting=0)
    for owner in ("a", "b"):
        engine.submit(feeding(owner, owner, 2 * NUM_IDS), 0.0)
    with pytest.raises(QueueFull, match="all unfinished"):
        engine.submit(feeding("c", "c", 2 * NUM_IDS), 0.0)
    engine.submit(feeding("d", "d", 8), 0.0)


def test_only_request_is_never_too_large() -> None:
    engine = FakeEngine(max_running=2, max_waiting=0)
    engine.submit(feeding("1", "a", 4 * NUM_IDS), 0.0)
