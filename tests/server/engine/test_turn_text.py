"""The thinking and the answer of a turn, however its tokens cut the text."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.text import MAX_SPACE, TurnText
from server.engine.types import Turn
from tests.fakes import allowed_ids

MAY = Turn("<think>", "</think>")
OPEN = replace(MAY, prompted="open")
LED = replace(OPEN, lead=">")
SKIPPED = replace(MAY, prompted="closed", lead=">")
USER = "\nUser:"
SPACE = " " * (MAX_SPACE - 1) + "\n"
BEFORE = replace(OPEN, stop=(USER,))

#: A turn, the strings that end its answer, the text: what is thought, the answer, and whether
#: a stop string was met.
TEXTS = [
    (MAY, (), " Hello <think> you", "", "Hello <think> you", False),
    (MAY, (), " <think>\nwell\n</think>\n\nHello ", "well", "Hello ", False),
    (MAY, (), "<thin king", "", "<thin king", False),
    (MAY, ("\n\n",), "\n\nUser: what", "", "", True),
    (OPEN, (), "\n well,\n\nwell \n</think>\nHello", "well,\n\nwell", "Hello", False),
    (OPEN, (), "well </thin> or < or </think", "well </thin> or < or </think", "", False),
    (OPEN, (), "</think>Hello", "", "Hello", False),
    (OPEN, ("ll", "\n\n"), "well\n\n</think>\n\nHello", "well", "He", True),
    (OPEN, ("llo!",), "well</think>Hello", "well", "Hello", False),
    (LED, (), ">\nwell</think>\n>Hello", "well", ">Hello", False),
    (LED, (), "\nwell</think>Hello", "well", "Hello", False),
    (SKIPPED, ("\n\n",), ">\n\nHello\n\nUser:", "", "Hello", True),
    (SKIPPED, (), ">> Hello", "", "> Hello", False),
    (BEFORE, (), "well\n\nUs\nUser: what</think>Hello", "well\n\nUs", "", True),
    (BEFORE, (USER,), "well\nUse</think>Hello\nUser: what", "well\nUse", "Hello", True),
    (BEFORE, (), "well</think>\nUser: what", "well", "", True),
    (OPEN, (), f"a{SPACE} \n</think> b", "a  ", "b", False),
    (OPEN, (), f"a{SPACE} \n", "a  ", "", False),
    (OPEN, (), f"a{SPACE} </thin b", f"a{SPACE} </thin b", "", False),
    (MAY, (), f"{SPACE}<think>a</think>b", "a", "b", False),
    (MAY, (), f"{SPACE} <think>a</think>b", "", "<think>a</think>b", False),
]


def read(turn: Turn, stop: tuple[str, ...], tokens: list[str]) -> tuple[str, str, bool]:
    """What is shown of ``tokens``; each is read by a reader of its own, that continues."""
    thought = text = ""
    state = TurnText(turn, stop, grammar=False).state
    for number, token in enumerate(tokens):
        reader = TurnText(turn, stop, grammar=False)
        reader.restore(state, number)
        shown = reader.push(token)
        thought, text, state = thought + (shown.thought or ""), text + shown.text, reader.state
        if shown.met_stop:
            last = reader.finish(met_stop=True)
            return thought + (last.thought or ""), text + last.text, True
    last = reader.finish(met_stop=False)
    return thought + (last.thought or ""), text + last.text, last.met_stop


@pytest.mark.parametrize(("turn", "stop", "text", "thought", "answer", "met"), TEXTS)
@given(data=st.data())
def test_thinking_and_answer_do_not_depend_on_the_tokens(
    turn: Turn,
    stop: tuple[str, ...],
    text: str,
    thought: str,
    answer: str,
    met: bool,
    data: st.DataObject,
) -> None:
    cuts = data.draw(st.sets(st.integers(1, len(text) - 1)))
    places = [0, *sorted(cuts), len(text)]
    tokens = [text[a:b] for a, b in pairwise(places)]
    assert read(turn, stop, tokens) == (thought, answer, met)


def test_white_space_without_an_end_is_not_withheld() -> None:
    for turn, first, thought, text in (
        (OPEN, "well", "well" + " " * 10_000 + "er", ""),
        (OPEN, "", "er", ""),
        (MAY, "", "", "er"),
        (replace(MAY, prompted="closed"), "", "", "er"),
    ):
        reader = TurnText(turn, (), grammar=False)
        shown = [reader.push(token) for token in [first, *[" "] * 10_000]]
        assert len(reader.state.undecided) <= MAX_SPACE
        shown += [reader.push("er"), reader.finish(met_stop=False)]
        assert "".join(each.thought or "" for each in shown) == thought
        assert "".join(each.text for each in shown) == text


def test_tokens_up_to_the_end_marker_are_thinking() -> None:
    for turn, tokens, count in (
        (OPEN, ["well", "</thi", "nk>\n", "He", "llo"], 3),
        (OPEN, ["well", "well", "</thi"], 3),
        (MAY, [" <", "think", ">", "</think>", " Hello"], 4),
        (MAY, [" ", "Hello"], 0),
        (SKIPPED, [">\n", "Hello"], 0),
    ):
        reader = TurnText(turn, (), grammar=False)
        for token in tokens:
            reader.push(token)
        reader.finish(met_stop=False)
        assert reader.num_thought == count, tokens


def test_events_of_the_answer_have_no_thought() -> None:
    reader = TurnText(OPEN, (), grammar=False)
    shown = [reader.push(token) for token in ("we", "ll</think>", "\n", "Hello", " you")]
    assert [each.thought for each in shown] == ["we", "ll", "", None, None]
    assert [each.text for each in shown] == ["", "", "", "Hello", " you"]


def forced(reader: TurnText) -> list[int] | None:
    """The ids that may come next; None where any may."""
    mask = reader.allowed(100, (7,))
    return None if mask is None else list(allowed_ids(mask, 100))


def test_budget_closes_the_thinking_and_nothing_else() -> None:
    turn = replace(OPEN, budget=2, close=(50, 51))
    reader = TurnText(turn, (), grammar=False)
    assert forced(reader) is None
    reader.push("a")
    assert forced(reader) is None
    reader.push("b")
    assert forced(reader) == [50]
    assert reader.push("\n").thought == ""
    again = TurnText(turn, (), grammar=False)
    again.restore(reader.state, 3)
    assert forced(again) == [51]
    assert again.push("</think>").text == ""
    assert forced(again) is None
    assert again.push("c").text == "c"
    assert forced(again) is None
    assert again.num_thought == 4


def test_answer_is_free_where_the_thinking_ended_within_its_budget() -> None:
    reader = TurnText(replace(OPEN, budget=2, close=(50,)), (), grammar=False)
    for token in ("a", "</think>", "b", "c"):
        reader.push(token)
        assert forced(reader) is None


def test_text_does_not_end_before_a_grammar_begins() -> None:
    reader = TurnText(replace(OPEN, gap=(60,)), (), grammar=True)
    allowed = forced(reader)
    assert allowed is not None and set(range(100)) - set(allowed) == {7}
    reader.push("well</think>")
    assert forced(reader) == [60] and reader.is_thinking
    assert reader.push("\n").text == "" and not reader.is_thinking
    assert forced(reader) is None
    assert reader.push("{}").text == "{}"


def test_what_a_token_has_behind_the_end_marker_is_not_shown_under_a_grammar() -> None:
    for rest in ("\n", "!"):
        reader = TurnText(replace(OPEN, gap=(60,)), (), grammar=True)
        assert reader.push(f"well</think>{rest}").text == ""
        assert not reader.is_thinking
        assert reader.push("{}").text == "{}"


def test_mask_has_a_bit_for_each_id_of_the_vocabulary() -> None:
    reader = TurnText(replace(OPEN, budget=0, close=(64,)), (), grammar=False)
    mask = reader.allowed(65, ())
    assert mask is not None and mask.dtype == np.uint32 and len(mask) == 3
    assert allowed_ids(mask, 65) == [64]


@pytest.mark.parametrize("turn", [MAY, OPEN, LED, SKIPPED])
@pytest.mark.parametrize("grammar", [False, True])
@given(data=st.data())
def test_tokens_that_are_said_to_be_unrestricted_get_no_mask(
    turn: Turn, grammar: bool, data: st.DataObject
) -> None:
    """Whatever they are, from any place in the text on."""
    budget = data.draw(st.none() | st.integers(0, 9))
    gap = (64,) if grammar else ()
    reader = TurnText(replace(turn, budget=budget, close=(50, 51), gap=gap), (), grammar)
    tokens = st.sampled_from(["<think>", "</think>", "</th", "ink>", "a", "\n", ">"])
    texts = data.draw(st.lists(tokens, min_size=12, max_size=20))
    free_until = 0  # no token before this one may have a mask
    for number, text in enumerate(texts):
        left = reader.num_unrestricted
        free_until = max(free_until, len(texts) if left is None else number + left)
        assert reader.allowed(128, [0]) is None or number >= free_until, texts
        reader.push(text)


def test_budget_leaves_tokens_unrestricted_up_to_its_end() -> None:
    reader = TurnText(replace(OPEN, budget=3, close=(50,)), (), grammar=False)
    left = []
    for text in ("a", "b", "c", "</think>", "x"):
        left.append(reader.num_unrestricted)
        reader.push(text)
    assert left == [3, 2, 1, 0, None]
