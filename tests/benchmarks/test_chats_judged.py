"""A judge sees no names, and each verdict is counted for the model that was meant."""

from __future__ import annotations

import pytest

from benchmarks.studies.chats.judged import count, orders, sheet, sign_test

CHATS = [
    {"questions": [f"q{n}"], "answers": {"ours": [f"one {n}"], "theirs": [f"two {n}"]}}
    for n in range(20)
]


def test_sheet_has_all_answers_and_no_name() -> None:
    text = sheet(CHATS)
    assert all(f"one {n}" in text and f"two {n}" in text for n in range(20))
    assert "ours" not in text
    assert "theirs" not in text


def test_both_come_first_sometimes() -> None:
    assert {names[0] for names in orders(CHATS)} == {"ours", "theirs"}


def test_verdicts_are_counted_for_the_model_behind_the_letter() -> None:
    letters = ["A" if names[0] == "ours" else "B" for names in orders(CHATS)]
    verdicts = {str(n): {"verdict": letter, "why": "w"} for n, letter in enumerate(letters, 1)}
    verdicts["1"]["verdict"] = "tie"
    found = count(CHATS, verdicts)
    assert found["wins"] == {"tie": 1, "ours": 19}
    assert found["by_chance"] == pytest.approx(2 / 2**19)


def test_sign_test_is_that_of_coins() -> None:
    assert sign_test([3, 1]) == pytest.approx(2 * (4 + 1) / 16)
    assert sign_test([2, 2]) == sign_test([]) == 1.0
