"""Drawn texts are scored against written ones, and the default sampling has been compared."""

from __future__ import annotations

import json

import pytest

from benchmarks.sampling import (
    RESULT,
    compared,
    grid,
    repeated_4grams,
    unknown_words,
    variety,
    words_of,
)
from model.bundled_models import DEFAULT_NAME
from server.engine.sampling import DEFAULTS
from server.engine.types import SamplingParams
from tests.tiny import TEXT, tiny_checkpoint


def test_words_have_no_marks() -> None:
    assert words_of('"It isn\'t," said He; 3 times.') == ["it", "isn't", "said", "he", "times"]


def test_repetition_is_the_part_of_runs_that_came_before() -> None:
    assert repeated_4grams(list("abcdefgh")) == 0
    assert repeated_4grams(list("abcdabcd")) == pytest.approx(1 / 5)
    assert repeated_4grams(["on"] * 13) == pytest.approx(9 / 10)
    assert repeated_4grams(["too", "short"]) == 0


def test_variety_does_not_depend_on_the_length() -> None:
    stretch = [str(number) for number in range(25)] * 2
    assert variety(stretch) == variety(stretch * 3) == 0.5
    assert variety(stretch[:49]) is None


def test_unknown_words_are_counted_each_time() -> None:
    assert unknown_words(["fox", "foxling", "foxling", "hen"], {"fox", "hen"}) == 0.5


def test_default_is_one_of_the_settings_that_were_compared() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert result["model"] == DEFAULT_NAME
    settings = [SamplingParams(**row["sampling"]) for row in result["settings"]]
    assert DEFAULTS in settings


def test_nearest_setting_to_the_written_texts_comes_first() -> None:
    stories = [TEXT * 2, TEXT[70:] * 2]
    checkpoint = tiny_checkpoint()
    found = compared(checkpoint, tiny_checkpoint("elu"), stories, set(words_of(TEXT)), 2, 40)
    assert found["held_out"].keys() == {
        *("repeated_4grams", "variety", "unknown_words", "bits_per_byte")
    }
    assert found["held_out"]["unknown_words"] < 0.1
    distances = [row["distance"] for row in found["settings"]]
    assert distances == sorted(distances)
    assert len(distances) == len(list(grid()))
