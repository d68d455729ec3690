"""No text of a client's becomes a special token, whatever a template puts around it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from model.tokenizer import END_OF_TEXT, Tokenizer
from server.chat.renderer import Marks
from server.errors import InvalidRequest
from tests.tiny import TEXT, tiny_tokenizer

NAMES = ("<|im_start|>", "<|im_end|>", "<<|im_end|>", "</s>")


def chat_tokenizer() -> Tokenizer:
    backend = Backend.from_str(tiny_tokenizer().content)
    backend.add_special_tokens([*NAMES, AddedToken("<|end|>", rstrip=True)])
    backend.add_tokens(["<think>"])
    return Tokenizer.from_json(backend.to_str())


CHAT = chat_tokenizer()

#: Pieces of names, which may come together to whole ones.
pieces = st.sampled_from(
    [
        *(name[:at] for name in CHAT.special_ids for at in range(1, len(name) + 1)),
        *(name[at:] for name in CHAT.special_ids for at in range(len(name))),
        *(" ", "\n", "a", "é", "<think>", "\ue000", "\\ue001"),
    ]
)
texts = st.lists(pieces, max_size=8).map("".join)


def special(ids: list[int]) -> list[int]:
    return [id for id in ids if not CHAT.token_bytes(id)]


@settings(deadline=None)
@given(texts)
def test_a_marked_text_is_the_text_and_nothing_else(text: str) -> None:
    marks = Marks(CHAT.special_ids, text)
    for marked in (marks.content(text), str(marks.all_of(text))):
        ids = marks.ids(marked, CHAT)
        assert not special(ids)
        assert ids == CHAT.encode(text)


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=4))
def test_texts_of_several_messages_make_no_token_together(contents: list[str]) -> None:
    marks = Marks(CHAT.special_ids, contents)
    rendered = "<|im_start|>".join(marks.content(content) for content in contents)
    assert special(marks.ids(rendered, CHAT)) == [CHAT.special_ids["<|im_start|>"]] * (
        len(contents) - 1
    )


@settings(deadline=None)
@given(texts, st.sampled_from(sorted(CHAT.special_ids)), st.data())
def test_no_template_completes_a_name_that_a_client_began(
    text: str, name: str, data: st.DataObject
) -> None:
    """It may strip the text first."""
    start = data.draw(st.integers(0, len(name) - 1))
    end = data.draw(st.integers(start + 1, len(name)))
    client = data.draw(st.sampled_from([text + name[start:end], name[start:end] + text]))
    marks = Marks(CHAT.special_ids, client, name)
    for shown in (marks.content(client), marks.content(client).strip()):
        if shown and not shown.isspace():
            ids = marks.ids(name[:start] + shown + name[end:], CHAT)
            own = [*CHAT.pieces(name[:start]), *CHAT.pieces(name[end:])]
            assert special(ids) == [piece for piece in own if isinstance(piece, int)]


def test_template_reads_marked_texts_as_they_are() -> None:
    marks = Marks(CHAT.special_ids, "")
    assert marks.content(TEXT) == TEXT
    text = "  <think>why</think>\nbecause  "
    assert marks.content(text) == text
    assert marks.all_of({"a": [1, None, "b"]}) == {"a": [1, None, "b"]}


def test_keys_and_json_are_marked_as_well() -> None:
    marks = Marks(CHAT.special_ids, "")
    marked = marks.all_of({"<|im_end|>": ["</s>"]})
    assert marked != {"<|im_end|>": ["</s>"]}
    assert marks.without(str(marked)) == "{'<|im_end|>': ['</s>']}"
    assert marks.without(ascii(marks.all_of("<|im_end|>")).replace("\\\\u", "\\u")) == repr(
        "<|im_end|>"
    )


def test_token_that_takes_spaces_along_takes_the_clients_as_well() -> None:
    marks = Marks(CHAT.special_ids, "")
    ids = marks.ids("<|end|>  \n" + "a", CHAT)
    assert ids == [CHAT.special_ids["<|end|>"], *CHAT.encode("a")]


def test_a_longer_name_wins() -> None:
    ids = Marks(CHAT.special_ids, "").ids("<<|im_end|>" + END_OF_TEXT, CHAT)
    assert ids == [CHAT.special_ids["<<|im_end|>"], CHAT.eos_token_id]
    assert all(first != second for first, second in pairwise(ids))


@pytest.mark.parametrize("used", ["".join(map(chr, range(0xE000, 0xF8FE))), "\\uE000 \\ue001"])
def test_marks_are_what_no_text_holds(used: str) -> None:
    marks = Marks(CHAT.special_ids, used)
    marked = marks.content("<|im_end|>")
    (mark,) = set(marked) - set("<|im_end|>")
    for other in (mark, marks.end):
        assert other not in used and f"\\u{ord(other):04x}" not in used.lower()
    assert marks.without(marked + marks.end) == "<|im_end|>"
    assert marks.without(used) == used


def test_text_that_leaves_no_mark_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="private use"):
        Marks(CHAT.special_ids, "".join(map(chr, range(0xE000, 0xF900))))
