from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.text import Detokenizer, StopStrings, text_within
from tests.tiny import tiny_tokenizer


def test_half_a_character_is_never_shown() -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    pieces = [detokenizer.push(id) for id in tiny_tokenizer().encode("a é 漢 🦊!")]
    assert "".join(pieces) == "a é 漢 🦊!"
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces


def test_bytes_that_are_no_character_are_replaced() -> None:
    tokenizer = tiny_tokenizer()
    (lead, *_) = tokenizer.encode("é")
    (a,) = tokenizer.encode("a")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(lead) == ""
    assert detokenizer.push(a) == "\ufffda"
    assert detokenizer.push(lead) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(a) == "a"


def test_restored_half_of_a_character_that_is_not_continued_is_replaced() -> None:
    tokenizer = tiny_tokenizer()
    (lead, *_), (a,) = tokenizer.encode("é"), tokenizer.encode("a")
    first, second = Detokenizer(tokenizer), Detokenizer(tokenizer)
    assert first.push(lead) == ""
    second.restore(first.undecoded)
    assert second.push(a) == "\ufffda"


def test_special_tokens_are_no_text() -> None:
    assert Detokenizer(tiny_tokenizer()).push(tiny_tokenizer().eos_token_id) == ""


@given(st.lists(st.integers(0, 299), max_size=60))
def test_any_tokens_give_valid_text_equal_to_decoding_at_once(ids: list[int]) -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    pieces = [detokenizer.push(id) for id in ids]
    for piece in pieces:
        piece.encode("utf-8")
    assert "".join(pieces) + detokenizer.flush() == tiny_tokenizer().decode(ids)


@given(st.lists(st.integers(0, 299), max_size=60), st.integers(0, 60), st.booleans())
def test_tokens_at_once_have_the_text_of_one_by_one(ids: list[int], cut: int, start: bool) -> None:
    single, whole = (Detokenizer(tiny_tokenizer(), start) for _ in range(2))
    pieces = [single.push(id) for id in ids]
    assert whole.push_all(ids[:cut]) + whole.push_all(ids[cut:]) == "".join(pieces)
    assert whole.undecoded == single.undecoded


@given(st.text(alphabet="aé漢🦊", max_size=20), st.lists(st.integers(0, 80), max_size=5))
def test_parts_of_a_text_add_up_to_it(text: str, cuts: list[int]) -> None:
    ids = tiny_tokenizer().encode(text)
    places = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = [
        text_within(tiny_tokenizer(), ids, start, end, at_start=True)
        for start, end in itertools.pairwise(places)
    ]
    assert "".join(parts) == text


@given(
    st.lists(st.text(alphabet="ab", max_size=3), max_size=20),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_cut_where_the_whole_text_would_be_cut(
    pieces: list[str], stops: list[str]
) -> None:
    matcher, shown, met = StopStrings(tuple(stops)), "", False
    text = ""
    for piece in pieces:
        part, met = matcher.push(piece)
        shown += part
        text += piece
        if met:
            break
        assert not any(stop in shown for stop in stops)
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    assert met == (first is not None)
    assert shown + matcher.flush() == (text if first is None else text[:first])


@pytest.mark.parametrize(("text", "shown"), [("hello EN", "hello "), ("hello E ", "hello E ")])
def test_possible_start_of_a_stop_string_is_withheld(text: str, shown: str) -> None:
    assert StopStrings(("END",)).push(text) == (shown, False)
