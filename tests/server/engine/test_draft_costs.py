from __future__ import annotations

import pytest

from server.engine.drafts import LEAST_ROW, DraftCosts

#: A large model: a call of eight rows takes a fifth longer than one of a single row.
LARGE = DraftCosts((1.0, 1.03, 1.09, 1.2, 1.5), keep_s=0.03)
#: Where arithmetic binds, a row takes as long as a call.
BOUND = DraftCosts((1.0, 2.0, 4.0, 8.0, 16.0))


def test_times_between_and_beyond_what_was_measured() -> None:
    assert LARGE.call_s(1) == 1.0
    assert LARGE.call_s(6) == pytest.approx(1.145)
    assert LARGE.call_s(24) == pytest.approx(1.8)


def test_call_of_more_rows_is_not_taken_to_be_shorter() -> None:
    noisy = DraftCosts((1.0, 0.9, 1.2, 1.1, 1.5))
    times = [noisy.call_s(rows) for rows in range(1, 20)]
    assert times == sorted(times)
    assert times[1] >= 1 + LEAST_ROW


def test_better_drafts_get_more_rows() -> None:
    numbers = [LARGE.best_number(rate, 15) for rate in (0.02, 0.3, 0.6, 0.9, 1.0)]
    assert numbers == sorted(numbers)
    assert numbers[0] == 0
    assert numbers[-1] == 15
    assert 0 < numbers[1] < numbers[3]


def test_limit_is_kept() -> None:
    assert LARGE.best_number(1.0, 4) == 4
    assert LARGE.best_number(1.0, 0) == LARGE.best_number(1.0, -3) == 0


def test_no_drafts_where_a_row_takes_as_long_as_a_call() -> None:
    assert BOUND.best_number(1.0, 15) == 0
    assert not BOUND.ever_pays(15)
    assert LARGE.ever_pays(15)


def test_one_more_draft_pays_while_all_are_likely_to_be_right() -> None:
    assert LARGE.one_more_pays(1.0, 1.0, 0)
    assert LARGE.one_more_pays(1.0, 1.0, 14)
    assert LARGE.one_more_pays(0.5, 0.6, 3)
    assert not LARGE.one_more_pays(0.5, 0.01, 3)
    assert not LARGE.one_more_pays(0.06, 1.0, 0), "the first one pays for the state before it"
    assert not BOUND.one_more_pays(1.0, 1.0, 0)
    assert not LARGE.one_more_pays(0.3, 1.0, 3, num_streams=64)


def test_risky_draft_is_not_put_behind_many_that_are_right() -> None:
    """Where it is wrong, all of them are fed again."""
    assert LARGE.one_more_pays(0.2, 1.0, 1)
    assert not LARGE.one_more_pays(0.2, 1.0, 7)


def test_other_streams_lose_what_a_call_takes_longer() -> None:
    """A draft has to be worth the time of all the streams that wait for it."""
    alone, among = (LARGE.best_number(0.5, 15, streams) for streams in (1, 8))
    assert 0 <= among < alone


def test_states_that_are_dear_to_keep_need_better_drafts() -> None:
    dear = DraftCosts(LARGE.times_s, keep_s=0.5)
    assert dear.best_number(0.3, 15) == 0 < LARGE.best_number(0.3, 15)


def test_tokens_fed_in_any_case_are_no_gain() -> None:
    assert LARGE.best_number(0.02, 15, 1, 6) == 0


def test_what_drafts_lose_is_their_time_less_what_those_that_are_right_give() -> None:
    costs = DraftCosts((1.0, 1.1, 1.3, 1.7, 2.5), keep_s=0.05, draft_s=0.2)
    assert costs.lost_s(1, 0) == pytest.approx(0.1 + 0.05 + 0.2 + 0.1)  # a row is fed again
    assert costs.lost_s(1, 1) == pytest.approx(0.1 + 0.05 + 0.2 - 1.0)
    assert costs.lost_s(3, 1) == pytest.approx(0.3 + 0.05 + 0.6 + 0.2 - 1.0)
    assert costs.lost_s(1, 1, num_streams=2) == pytest.approx(0.1 + 0.05 + 0.2 - 1.1 / 2)
