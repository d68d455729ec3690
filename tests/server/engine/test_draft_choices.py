"""What is remembered of places in a grammar."""

from __future__ import annotations

import numpy as np

from server.engine.drafts import FIRST_CHOICE_RATE, MAX_CHOICES, Choices, place_of


def test_places_are_those_of_equal_masks() -> None:
    one, other = np.arange(9, dtype=np.uint32), np.arange(9, dtype=np.uint32)
    assert place_of(one) == place_of(other)
    other[4] ^= 1
    assert place_of(one) != place_of(other)


def test_last_token_of_a_place_and_after_a_token() -> None:
    choices = Choices()
    assert choices.last(1) is choices.after(7) is None
    choices.learn(1, 7, 30)
    choices.learn(2, 8, 40)
    choices.learn(1, 8, 31)
    assert (choices.last(1), choices.last(2)) == (31, 40)
    assert (choices.after(7), choices.after(8)) == (30, 31)


def test_rate_of_a_place_follows_how_often_its_token_came_again() -> None:
    choices = Choices()
    choices.learn(1, 7, 30)
    assert choices.rate(1) == FIRST_CHOICE_RATE, "nothing was seen to come again"
    for _ in range(9):
        choices.learn(1, 7, 30)
    assert choices.rate(1) > 0.9
    for token in range(9):
        choices.learn(1, 7, token)
    assert choices.rate(1) < 0.1
    assert choices.rate(2) == FIRST_CHOICE_RATE


def test_memory_is_bounded() -> None:
    choices = Choices()
    for number in range(3 * MAX_CHOICES):
        choices.learn(number, number, 5)
        choices.learn(0, number, 5)
    sizes = len(choices._last), len(choices._rates), len(choices._after)
    assert max(sizes) <= MAX_CHOICES + 1
