"""What the engine sees of a grammar: masks, and a text that comes to its end in time."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from server.constraints.compiler import NotAllowed
from server.constraints.grammar import GrammarEndings, Search, Vocabulary, grammar_text, ids_of
from server.errors import InvalidRequest
from tests.server.constraints.drawing import (
    compiled,
    costs_of,
    draw,
    matcher,
    of_schema,
    tokenizer,
    vocabulary,
)
from tests.server.constraints.schemas import PERSON, TREE

WORDS = {"type": "regex", "regex": "[a-z]+( [a-z]+)*"}


def test_every_token_has_the_bytes_that_the_tokenizer_says() -> None:
    backend = vocabulary().backend
    for id in range(tokenizer().vocab_size):
        expected = tokenizer().token_bytes(id)
        if 0xFF in expected:  # in no text, and llguidance's own mark
            continue
        assert backend.is_special_token(id) == (not expected)
        assert not expected or backend.decode_bytes([id]) == expected


def test_mask_has_whole_words_and_no_bit_beyond_the_vocabulary() -> None:
    mask = matcher(compiled(WORDS)).allowed()
    assert (mask.dtype, mask.shape) == (np.dtype(np.uint32), (-(-tokenizer().vocab_size // 32),))
    assert ids_of(mask).max() < tokenizer().vocab_size


def test_end_of_text_may_come_exactly_where_the_text_may_end() -> None:
    eos, place = tokenizer().eos_token_id, matcher(compiled({"type": "regex", "regex": "ab?"}))
    assert eos not in ids_of(place.allowed())
    place.accept(*tokenizer().encode("a"))
    assert eos in ids_of(place.allowed())
    assert not place.is_over()
    place.accept(*tokenizer().encode("b"))
    assert ids_of(place.allowed()).tolist() == [eos]
    assert place.is_over()


def test_token_that_is_not_allowed_raises() -> None:
    place = matcher(compiled(WORDS))
    with pytest.raises(NotAllowed):
        place.accept(*tokenizer().encode("7"))
    with pytest.raises(NotAllowed):
        matcher(compiled(WORDS)).accept(tokenizer().eos_token_id)


def test_copy_is_independent() -> None:
    place = matcher(compiled({"type": "choice", "choices": ["xa", "xb"]}))
    place.accept(*tokenizer().encode("x"))
    other = place.copy()
    place.accept(*tokenizer().encode("a"))
    assert place.is_over()
    assert not other.is_over()
    other.accept(*tokenizer().encode("b"))
    assert other.is_over()


@pytest.mark.slow
@pytest.mark.parametrize("schema", [PERSON, TREE, {"type": "object"}])
def test_replayed_matcher_gives_the_same_masks(schema: dict[str, object]) -> None:
    """After a restart the session continues as it would have, in the closing too."""
    grammar, budget = compiled(of_schema(schema)), 60
    place, choose, tokens = matcher(grammar), random.Random(5), list[int]()
    while len(tokens) < budget and not place.is_over():
        mask = place.allowed(budget - len(tokens))
        anew = matcher(grammar)
        for token in tokens:
            anew.accept(token)
        assert np.array_equal(anew.allowed(budget - len(tokens)), mask), tokens
        token = int(choose.choice(ids_of(mask).tolist()))
        if token == tokenizer().eos_token_id:
            break
        place.accept(token)
        tokens.append(token)


def test_with_room_enough_nothing_is_kept_back() -> None:
    place = matcher(compiled(WORDS))
    assert np.array_equal(place.allowed(1000), place.allowed())
    assert ids_of(place.allowed(2)).size < ids_of(place.allowed()).size


@pytest.mark.slow
def test_every_budget_that_an_end_fits_into_is_kept() -> None:
    grammar = compiled(of_schema(TREE))
    least = len(costs_of(grammar).ending)
    for budget in range(1, 60):
        text, ended = draw(grammar, budget, budget)
        assert ended == (budget >= least), (budget, least, text)
        if ended:
            json.loads(text)


def test_a_later_and_smaller_budget_is_kept_if_an_end_fits() -> None:
    """A session continues under its constraint with another ``max_tokens``."""
    grammar = compiled(of_schema({"type": "array", "items": {"type": "string"}}))
    place = matcher(grammar)
    for token in tokenizer().encode('["some words, ","and mo'):
        place.accept(token)
    text, ended = draw(grammar, 1, 3, place)
    assert ended
    assert isinstance(json.loads('["some words, ","and mo' + text), list)


def test_end_of_a_record_is_searched_for_once_in_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes some tens of milliseconds; the records of a list end alike."""
    names = {name: {"type": "string"} for name in ("name", "place")}
    item = {"type": "object", "properties": names, "required": ["name", "place"]}
    place = matcher(compiled(of_schema({"type": "array", "items": item})))
    searches: list[object] = []
    run = Search.run
    monkeypatch.setattr(Search, "run", lambda *args: (searches.append(args), run(*args))[1])
    record = '{"name":"Ann","place":"here"},'
    counts = []
    for text in ("[" + record, record, record):
        for token in vocabulary().longest(text):
            place.accept(token)
        counts.append(len(searches))
        copied = place.copy()
        assert np.array_equal(copied.allowed(40), place.allowed(40))
    assert counts[0] > 0
    assert counts[2] == counts[1], "the first comma had another ending before it"
    ending = place._ending
    assert ending is not None
    assert place._place.validate_tokens([*ending]) >= len(ending)


def test_grammar_that_becomes_too_much_work_ends_its_request_alone() -> None:
    """Such a one is refused if it is checked; here it was not."""
    text = grammar_text({"type": "regex", "regex": "b|(.*a.{20}){3}"})
    grammar = json.dumps({"costs": [tokenizer().encode("b"), 1], **json.loads(text)})
    place, other = matcher(grammar), matcher(grammar)

    def go_on() -> None:
        choose = random.Random(1)
        while True:
            ids = ids_of(place.allowed())
            place.accept(int(choose.choice(ids[ids != tokenizer().eos_token_id].tolist())))

    with pytest.raises(InvalidRequest, match="too much work") as error:
        go_on()
    assert error.value.param == "response_format"
    other.accept(*tokenizer().encode("b"))
    assert ids_of(other.allowed()).size


def test_vocabulary_that_cannot_spell_a_call_has_endings_of_other_texts() -> None:
    """Such as one whose tokens are digits: a server of its model starts, and follows grammars."""
    vocabulary = Vocabulary([b"", *(str(digit).encode() for digit in range(10))], 0)
    with pytest.raises(ValueError, match="no token begins"):
        vocabulary.longest("1<")
    start = vocabulary.matcher('start: "12" /[0-9]{3}/')
    ending = GrammarEndings(vocabulary).shortest(start)
    assert ending is not None
    assert start.validate_tokens([*ending]) == len(ending) >= 5
