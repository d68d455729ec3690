"""Names in a text: the longest at each place, by work that the text alone bounds."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from model.tokenizer import Names, Tokenizer
from tests.tiny import tiny_tokenizer

alphabet = st.text("<|>a b]^-\\", min_size=1, max_size=4)
texts = st.text("<|>a b]^-\\\n", max_size=40)


@given(st.sets(alphabet, max_size=8), texts)
def test_places_are_those_of_each_name_the_longest_first(names: set[str], text: str) -> None:
    found = [
        (place, max(starting, key=len))
        for place in range(len(text))
        if (starting := [name for name in names if text.startswith(name, place)])
    ]
    assert list(Names(names).places(text)) == found


def test_empty_name_is_never_found() -> None:
    assert list(Names(["", "a"]).places("ba")) == [(1, "a")]
    assert list(Names([]).places("ba")) == []


@pytest.mark.parametrize("text", ["<|" * 300_000, "<|reserved_token_" * 40_000])
def test_beginnings_of_many_names_are_looked_up_not_tried(text: str) -> None:
    """One expression of all names took minutes for these, without the interpreter's lock free."""
    names = [f"<|reserved_token_{index}|>" for index in range(500)]
    assert list(Names(names).places(text + names[-1])) == [(len(text), names[-1])]


@given(texts)
def test_tokens_that_take_spaces_along_do_so_as_one_expression_says(text: str) -> None:
    both, before, behind = "<a>", "<b>", "<|>"
    backend = Backend.from_str(tiny_tokenizer().content)
    backend.add_special_tokens(
        [
            AddedToken(both, lstrip=True, rstrip=True),
            AddedToken(before, lstrip=True),
            AddedToken(behind, rstrip=True),
        ]
    )
    tokenizer = Tokenizer.from_json(backend.to_str())
    expression = re.compile(r"\s*(<a>)\s*|\s*(<b>)|(<\|>)\s*")
    found: list[str | int] = []
    start = 0
    for match in expression.finditer(text):
        found += [text[start : match.start()]] if match.start() > start else []
        found.append(tokenizer.special_ids[match[match.lastindex or 0]])
        start = match.end()
    found += [text[start:]] if start < len(text) else []
    assert list(tokenizer.pieces(text)) == found


def test_spaces_before_no_token_are_passed_once() -> None:
    """``\\s*`` before a name went through the rest of the spaces from each of them."""
    backend = Backend.from_str(tiny_tokenizer().content)
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer = Tokenizer.from_json(backend.to_str())
    text = " " * 1_000_000
    assert list(tokenizer.pieces(text + "x")) == [text + "x"]
    assert list(tokenizer.pieces(text + "<mask>")) == [tokenizer.special_ids["<mask>"]]
