"""Tokenizers of the library's format: its ids, its decoding, exact bytes, and who is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from model.tokenization.base import Ends, TokenizerError
from model.tokenization.library import LibraryCodec
from model.tokenizer import Tokenizer
from server.engine.text import Detokenizer
from tests.model.tokenization.files import LLAMA_ENDS, TEXTS, llama, llama_tokenizer, neox
from tests.tiny import tiny_tokenizer

STYLES = ("legacy", "always", "first", "never", "decoder")
KINDS = (*STYLES, "neox")


@cache
def pair(kind: str) -> tuple[Tokenizer, Backend]:
    """Ours and the library's."""
    text = neox() if kind == "neox" else llama(kind)
    ends = Ends() if kind == "neox" else LLAMA_ENDS
    backend = Backend.from_str(text)
    backend.encode_special_tokens = True
    return Tokenizer(LibraryCodec(text, ends)), backend


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_ids_are_those_of_the_library(kind: str, text: str) -> None:
    ours, theirs = pair(kind)
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", STYLES)
@given(words=st.lists(st.sampled_from(["<s>", "</s>", "a", " a", "▁", "Once"]), max_size=8))
def test_special_names_are_found_as_by_the_library(kind: str, words: list[str]) -> None:
    theirs, text = Backend.from_str(llama(kind)), "".join(words)
    ours = pair(kind)[0].encode(text, allow_special=True)
    assert ours == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_decoding_a_text_is_that_of_the_library(kind: str, text: str) -> None:
    ours, theirs = pair(kind)
    ids = ours.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_decoding_any_ids_is_that_of_the_library_where_bytes_are_characters(
    kind: str, data: st.DataObject
) -> None:
    ours, theirs = pair(kind)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=30))
    # The library writes U+FFFD for each byte of a run of byte tokens that is broken anywhere.
    runs = groupby(ids, key=lambda id: re.fullmatch("<0x..>", theirs.id_to_token(id)) is not None)
    broken = any(is_bytes and not is_utf8(ours, list(run)) for is_bytes, run in runs)
    if not broken:
        assert ours.decode(ids) == theirs.decode(ids)


def is_utf8(tokenizer: Tokenizer, ids: list[int]) -> bool:
    try:
        b"".join(map(tokenizer.token_bytes, ids)).decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_exact_ids_have_the_bytes_of_the_text(kind: str, text: str) -> None:
    ours, _ = pair(kind)
    assert b"".join(map(ours.token_bytes, ours.encode_exact(text))) == text.encode()


@pytest.mark.parametrize("kind", STYLES)
@given(text=TEXTS)
def test_continuation_has_no_space_in_front(kind: str, text: str) -> None:
    ours, _ = pair(kind)
    data = b"".join(map(ours.token_bytes, ours.encode_continuation(text)))
    assert data.decode() == text.replace("▁", " ")


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_stream_is_the_whole_decoding_wherever_it_is_cut(kind: str, data: st.DataObject) -> None:
    ours, _ = pair(kind)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = Detokenizer(ours)
    before = "".join(map(detokenizer.push, ids[:cut]))
    other = Detokenizer(ours, start=not b"".join(map(ours.token_bytes, ids[:cut])))
    other.restore(detokenizer.undecoded, not b"".join(map(ours.token_bytes, ids[:cut])))
    after = "".join(map(other.push, ids[cut:])) + other.flush()
    assert before + after == ours.decode(ids)


@pytest.mark.parametrize("style", ["legacy", "always", "first"])
@pytest.mark.parametrize("text", ["Once", " Once", "  Once", "Once ", "a\n b", "\n", " ", "   "])
def test_spaces_of_a_text_come_back(style: str, text: str) -> None:
    ours = llama_tokenizer(style)
    lost = 1 if style != "legacy" and text.startswith(" ") else 0  # as in the library
    assert ours.decode(ours.encode(text)) == text[lost:]


def test_tokens_of_bytes_and_of_text_have_their_bytes() -> None:
    ours = llama_tokenizer()
    ids = ours.encode("Once 漢")
    assert b"".join(map(ours.token_bytes, ids)) == " Once 漢".encode()
    assert ours.token_bytes(3 + 0x41) == b"A"
    assert [ours.token_bytes(id) for id in (0, 1, 2)] == [b"", b"", b""]
    assert ours.special_ids == {"<unk>": 0, "<s>": 1, "</s>": 2}


def test_runs_of_spaces_are_single_tokens_of_neox() -> None:
    ours = pair("neox")[0]
    (spaces,) = ours.encode(" " * 24)
    assert ours.token_bytes(spaces) == b" " * 24
    assert ours.token_bytes(spaces)
    assert ours.decode(ours.encode("a\n    b")) == "a\n    b"
    assert ours.eos_token_id == 0


def test_names_of_ends_are_special_regardless_of_the_file() -> None:
    values = json.loads(llama())
    for token in values["added_tokens"]:
        token["special"] = False
    ours = Tokenizer(LibraryCodec(json.dumps(values), LLAMA_ENDS))
    assert not ours.token_bytes(2)
    assert 2 not in ours.encode("a</s>b")
    assert ours.decode([*ours.encode("a"), 2]) == "a"


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", ["<|tool_call_start|>", "<TOOLCALL>"])
def test_ends_of_a_list_of_calls_are_text_of_answers_alone(name: str, is_special: bool) -> None:
    backend = Backend.from_str(tiny_tokenizer().content)
    backend.add_tokens([AddedToken(name, special=is_special)])
    ours = Tokenizer.from_json(backend.to_str())
    id = ours.special_ids[name]
    assert ours.token_bytes(id) == name.encode()
    assert id not in ours.silent_ids
    assert ours.decode([id, *ours.encode("[f()]")]) == f"{name}[f()]"
    assert id not in ours.encode(name)
    assert id not in ours.encode_exact(name)
    assert ours.encode(name, allow_special=True) == [id]


def test_text_is_neither_cut_nor_filled_up_as_the_file_was_used_last() -> None:
    backend = Backend.from_str(llama())
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    ours = Tokenizer(LibraryCodec(backend.to_str(), LLAMA_ENDS))
    assert ours.encode("Once upon a time") == llama_tokenizer().encode("Once upon a time")


@pytest.mark.parametrize("kind", KINDS)
def test_content_is_a_file_of_the_same_tokenizer(kind: str) -> None:
    ours, _ = pair(kind)
    again = Tokenizer(LibraryCodec(ours.content, Ends(ids=((ours.eos_token_id, "config.json"),))))
    assert again.digest == ours.digest
    assert again.encode("Once upon  a time") == ours.encode("Once upon  a time")


def changed(**fields: Any) -> Callable[[], str]:
    def text() -> str:
        return json.dumps({**json.loads(llama()), **fields})

    return text


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(model={"type": "WordPiece"}), "model WordPiece is not supported: it drops spaces"),
        (changed(model={"type": "WordLevel"}), "model WordLevel is not supported: words outside"),
        (changed(model={"type": "New"}), "model New is not supported: only BPE and Unigram"),
        (changed(model={"type": "Unigram"}), "model Unigram is not byte-level and has no byte"),
        (lambda: llama(byte_fallback=False), "BPE is not byte-level and has no byte fallback"),
        (lambda: llama(end_of_word_suffix="</w>"), "end_of_word_suffix '</w>' is not supported"),
        (changed(pre_tokenizer={"type": "Whitespace"}), "Whitespace is not supported: it drops"),
        (
            changed(pre_tokenizer={"type": "Punctuation", "behavior": "Removed"}),
            "pre_tokenizer Punctuation is not supported",
        ),
        (changed(decoder=None), "no byte fallback, in model and decoder"),
        (changed(decoder={"type": "WordPiece", "prefix": "##"}), "no byte fallback"),
        (changed(decoder=sequence(FALLBACK, FUSE)), r"decoder \[ByteFallback, Fuse\] is not"),
        (changed(decoder=sequence(REPLACE, FALLBACK, STRIP)), "Strip.* is not supported"),
        (
            changed(decoder=sequence(REPLACE, FALLBACK, FUSE, {**STRIP, "stop": 1})),
            "decoder .*Strip.* is not supported",
        ),
        (changed(decoder=sequence(REPLACE, FUSE, FALLBACK)), "Fuse, ByteFallback.* is not"),
        (lambda: llama().replace("<0x0A>", "<nl>"), "no token '<0x0A>' for a byte"),
        (lambda: "[]", "not a JSON object with a model"),
        (lambda: "{", "is not JSON"),
    ],
)
def test_kinds_that_lose_text_are_refused_by_name(text: Callable[[], str], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        LibraryCodec(text(), LLAMA_ENDS)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": ["BPE"]}},
        {"pre_tokenizer": "ByteLevel"},
        {"pre_tokenizer": {"type": {}}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": 3}},
        {"decoder": [1]},
        {"decoder": {"no": "type"}},
        {"decoder": {"type": "Sequence", "decoders": [{"type": 7}]}},
    ],
)
def test_values_of_other_types_are_refused(changes: dict[str, Any]) -> None:
    values = json.loads(llama())
    values |= {name: value for name, value in changes.items() if name != "model"}
    values["model"] |= changes.get("model", {})
    with pytest.raises(TokenizerError):
        Tokenizer.from_json(json.dumps(values))


@pytest.mark.parametrize("id", [1 << 24, 1 << 40])
def test_large_id_is_refused_before_anything_is_made_of_it(id: int) -> None:
    token = {"id": id, "content": "<x>", "special": True, "single_word": False}
    added = {**token, "lstrip": False, "rstrip": False, "normalized": False}
    values = json.loads(llama())
    values["added_tokens"].append(added)
    with pytest.raises(TokenizerError, match=r"an id is not in 0\.\.1048576"):
        Tokenizer.from_json(json.dumps(values))


def test_long_token_is_refused() -> None:
    values = json.loads(llama())
    values["model"]["vocab"]["x" * 4097] = 5000
    with pytest.raises(TokenizerError, match="a token is longer than 1,024 bytes"):
        Tokenizer.from_json(json.dumps(values))
