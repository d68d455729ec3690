"""Texts that were encoded before: what is taken from them has the ids of the whole text."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from model.bundled_models import DEFAULT_MODEL
from model.tokenization import base
from model.tokenization.base import Encoded, KnownTexts
from model.tokenization.gguf import CUTS
from model.tokenization.library import LibraryCodec
from model.tokenization.world import PUBLISHED, read_world
from model.tokenizer import Tokenizer
from tests.model.tokenization.files import LLAMA_ENDS, TEXTS, llama

#: What ends, joins or begins words in one of the patterns.
PARTS = st.lists(
    st.one_of(
        TEXTS,
        st.sampled_from(
            [
                "12",
                "345",
                " 6789",
                "'",
                "'s",
                "don't ",
                "?!",
                "...\n\n",
                " \n ",
                "\t\t",
                "<|a",
                "b|>",
            ]
        ),
        st.sampled_from(["the lion ", "and the mouse. ", "he said: ", "<|ab|>", "<|a", "b|>"]),
    ),
    max_size=12,
)


@cache
def bundled(name: str) -> LibraryCodec:
    """The bundled tokenizer, with the words of a cut and a name that is added."""
    values = json.loads((DEFAULT_MODEL / "tokenizer.json").read_text())
    backend = Backend.from_str(json.dumps(values))
    CUTS[name].apply(backend)
    backend.add_tokens([AddedToken("<|ab|>", special=False, normalized=False)])
    return LibraryCodec(backend.to_str())


@cache
def metaspace() -> LibraryCodec:
    """Llama's kind, with words."""
    values = json.loads(llama("never"))
    values["pre_tokenizer"]["split"] = True
    return LibraryCodec(json.dumps(values), LLAMA_ENDS)


CODECS: dict[str, Callable[[], Any]] = {
    **{cut: lambda cut=cut: bundled(cut) for cut in CUTS},
    "world": cache(lambda: read_world(PUBLISHED)),
    "metaspace": metaspace,
    **{
        style: cache(lambda style=style: LibraryCodec(llama(style), LLAMA_ENDS))
        for style in ("legacy", "first", "always")
    },
}


@pytest.mark.parametrize("name", CODECS)
@given(parts=PARTS, following=PARTS)
def test_settled_part_is_the_same_whatever_follows(
    name: str, parts: list[str], following: list[str]
) -> None:
    codec = CODECS[name]()
    text, rest = "".join(parts), "".join(following)
    found = codec.settled(text)
    whole = codec.settled(text + rest).ids
    assert whole[: found.settled_ids] == found.ids[: found.settled_ids]
    assert whole[found.settled_ids :] == codec.settled((text + rest)[found.settled_chars :]).ids


@pytest.mark.parametrize("name", [*CUTS, "world", "metaspace"])
def test_all_but_the_last_words_of_plain_text_are_settled(name: str) -> None:
    text = "The lion and the mouse went home.\n\n" * 40
    found = CODECS[name]().settled(text)
    assert 0 < len(text) - found.settled_chars < 200
    assert 0 < len(found.ids) - found.settled_ids < 100


@pytest.mark.parametrize("name", CODECS)
@given(parts=PARTS, following=PARTS)
def test_codec_that_remembers_gives_the_same_ids(
    name: str, parts: list[str], following: list[str]
) -> None:
    codec, text = CODECS[name](), "".join(parts)
    remembering, longer = codec.remembering(), text + "".join(following)
    methods = ("encode", "encode_after_special", "encode_continuation", "encode_exact")
    with patch.object(base, "MIN_KNOWN_CHARS", 1):
        for method in methods:
            for one in (text, longer, longer, text):
                assert getattr(remembering, method)(one) == getattr(codec, method)(one)


class Letters:
    """An encoder whose ids are the characters; all but the last two are settled."""

    def __init__(self) -> None:
        self.texts = list[str]()
        self.known = KnownTexts(self.plain, self.settled)

    def plain(self, text: str) -> list[int]:
        return [*map(ord, text)]

    def settled(self, text: str) -> Encoded:
        self.texts.append(text)
        num = max(0, len(text) - 2)
        return Encoded(self.plain(text), num, num)


HEAD = "x" * base.MIN_KNOWN_CHARS


@given(st.lists(st.tuples(st.integers(0, 20), st.text("abc", max_size=6)), max_size=20))
def test_texts_that_grow_and_fork_have_their_ids(steps: list[tuple[int, str]]) -> None:
    letters, texts = Letters(), [HEAD]
    for place, more in steps:
        text = texts[place % len(texts)] + more
        texts.append(text)
        assert letters.known.encode(text) == letters.plain(text)


def test_only_what_follows_the_settled_part_is_encoded() -> None:
    letters = Letters()
    for text in (HEAD, HEAD + "one", HEAD + "one, two", HEAD + "one, two", HEAD + "another"):
        letters.known.encode(text)
    assert letters.texts == [HEAD, "xxone", "ne, two", "xxanother"]


def test_texts_without_anything_settled_are_found_again_alone() -> None:
    calls = []

    def settled(text: str) -> Encoded:
        calls.append(text)
        return Encoded([*map(ord, text)])

    texts = KnownTexts(lambda text: [], settled)
    for text in (HEAD, HEAD, HEAD + "a"):
        assert texts.encode(text) == [*map(ord, text)]
    assert calls == [HEAD, HEAD + "a"]


def test_what_was_used_least_recently_is_forgotten_for_room() -> None:
    letters = Letters()
    first, second, third = (f"{letter}{HEAD}" for letter in "abc")
    with patch.object(base, "MAX_KNOWN_BYTES", 2 * (5 * len(first) + 100)):
        for text in (first, second, first, third):
            letters.known.encode(text)
        before = len(letters.texts)
        letters.known.encode(first)
        assert len(letters.texts) == before
        letters.known.encode(second)
        assert len(letters.texts) == before + 1


def test_short_texts_are_not_remembered() -> None:
    letters = Letters()
    assert letters.known.encode("ab") == letters.plain("ab")
    assert letters.texts == []


def test_a_conversation_in_chatml_has_the_ids_of_each_part() -> None:
    tokenizer = Tokenizer.load(DEFAULT_MODEL / "tokenizer.json").remembering()
    turn = "Once upon a time there was a lion. " * 20
    for num_turns in range(1, 4):
        text = "<|endoftext|>".join([turn] * num_turns)
        plain = [
            id
            for piece in tokenizer.pieces(text)
            for id in ([piece] if isinstance(piece, int) else tokenizer.encode_exact(piece))
        ]
        assert tokenizer.encode(text, allow_special=True) == plain
