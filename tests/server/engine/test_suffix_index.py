from __future__ import annotations

import random

from server.engine.drafts import INDEX_BYTES, MAX_MATCH, MAX_PLACES, NGRAM, RING_TOKENS, SuffixIndex


def index_of(*parts: list[int]) -> SuffixIndex:
    index = SuffixIndex()
    for part in parts:
        index.extend(part)
    return index


def guess(index: SuffixIndex, limit: int) -> tuple[int, list[int]]:
    place, length = index.find()
    return length, index.following(place, limit) if length else []


def test_end_of_a_text_that_occurred_before_is_found() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert guess(index_of(text, [20, 3, 4, 5]), 4) == (3, [6, 7, 8, 9])
    assert guess(index_of(text, [20, 2, 3, 4, 5]), 2) == (4, [6, 7])


def test_text_without_a_repetition_finds_nothing() -> None:
    assert index_of().find() == index_of([1]).find() == (0, 0)
    assert index_of(list(range(500))).find() == (0, 0)
    assert index_of([1, 2, 3, 4, 2, 3]).find() == (0, 0), f"{NGRAM - 1} tokens are too few"


def test_longest_of_the_nearest_places_is_taken() -> None:
    text = [9, 1, 2, 3, 70, 8, 1, 2, 3, 71, 9, 1, 2, 3]
    assert guess(index_of(text), 1) == (4, [70])
    assert guess(index_of([*text, 72, 8, 1, 2, 3]), 1) == (4, [71])
    far = [9, 1, 2, 3, 70, *[8, 1, 2, 3, 71] * MAX_PLACES, 9, 1, 2, 3]
    assert guess(index_of(far), 1) == (3, [71])


def test_of_equal_places_the_last_one_is_taken() -> None:
    assert guess(index_of([1, 2, 3, 70, 1, 2, 3, 71, 1, 2, 3]), 1) == (3, [71])


def test_repetition_that_reaches_the_end_continues_from_its_beginning() -> None:
    assert guess(index_of([5, 6, 7] * 3), 7)[1] == [5, 6, 7, 5, 6, 7, 5]
    assert guess(index_of([4] * 10), 5)[1] == [4] * 5


def test_result_does_not_depend_on_how_the_text_was_cut() -> None:
    draw = random.Random(3)
    text = [draw.randrange(4) for _ in range(300)]
    whole, parts = index_of(text), SuffixIndex()
    for token in text:
        parts.extend([token])
    assert guess(whole, 9) == guess(parts, 9)


def test_what_left_the_ring_is_not_found_and_memory_stays_the_same() -> None:
    passage = [1, 2, 3, 4, 5, 6]
    near = [10 + i for i in range(RING_TOKENS - len(passage) - 5)]
    index = index_of(passage, near, [2, 3, 4])
    assert guess(index, 2) == (3, [5, 6])
    index.extend([20_000 + i for i in range(20)])
    index.extend([2, 3, 4])
    assert index.find()[1] == 3, "the second time is still there"
    index.extend(list(range(30_000, 30_000 + 3 * RING_TOKENS)))
    index.extend([2, 3, 4])
    assert index.find() == (0, 0)
    parts = (index._ring, index._before, index._heads)
    assert sum(part.itemsize * len(part) for part in parts) == INDEX_BYTES


def test_length_of_a_match_is_bounded() -> None:
    text = list(range(200))
    assert guess(index_of(text, text), 3) == (MAX_MATCH, [0, 1, 2])


def test_what_is_found_is_where_the_end_has_been() -> None:
    """Against a search through all of the text."""
    draw = random.Random(1)
    for _ in range(200):
        text = [draw.randrange(3) for _ in range(draw.randrange(4, 60))]
        place, length = index_of(text).find()
        ends = [i for i in range(NGRAM, len(text)) if text[i - NGRAM : i] == text[-NGRAM:]]
        assert bool(length) == bool(ends), text
        if length:
            assert place in ends
            assert text[place - length : place] == text[-length:]
