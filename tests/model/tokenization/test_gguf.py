"""Tokenizers inside GGUF files: the same ids and bytes as from their own files."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import GPTNeoXTokenizer, Qwen2Tokenizer, Qwen3_5Tokenizer

from model.tokenization.base import Codec, TokenizerError
from model.tokenization.gguf import escaped, read_gguf_codec, unescaped
from model.tokenization.library import LibraryCodec
from model.tokenization.world import WorldCodec, read_world
from tests.model.tokenization.test_world import published
from tests.tiny import tiny_tokenizer

P = "tokenizer.ggml."
SIZE = 1 << 16
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5


def world_metadata(tokens: dict[int, bytes], size: int) -> dict[str, Any]:
    names = [tokens.get(id, b"[PAD%d]" % id) for id in range(size)]
    types = [NORMAL if id in tokens else UNUSED for id in range(size)]
    return {
        P + "model": "rwkv",
        P + "tokens": [b"<s>", *(escaped(name) for name in names[1:])],
        P + "token_type": np.array([CONTROL, *types[1:]], np.int32),
        P + "bos_token_id": 0,
        P + "eos_token_id": 0,
    }


def byte_level_metadata() -> dict[str, Any]:
    values = json.loads(tiny_tokenizer().content)["model"]
    ids = {id: token.encode() for token, id in values["vocab"].items()}
    return {
        P + "model": "gpt2",
        P + "pre": "gpt-2",
        P + "tokens": [ids[id] for id in range(len(ids))],
        P + "token_type": np.array([CONTROL] + [NORMAL] * (len(ids) - 1), np.int32),
        P + "merges": [" ".join(merge).encode() for merge in values["merges"]],
        P + "eos_token_id": 0,
    }


def read(metadata: dict[str, Any], size: int) -> Codec | None:
    arrays = {k: v for k, v in metadata.items() if isinstance(v, list | np.ndarray)}
    return read_gguf_codec({k: v for k, v in metadata.items() if k not in arrays}, arrays, size)


BYTES = {id + 1: bytes([id]) for id in range(256)}


def test_world_is_the_published_file() -> None:
    wanted = read_world(published())
    tokens = {id: token for id, token in enumerate(wanted.token_bytes) if token}
    codec = read(world_metadata(tokens, SIZE), SIZE)
    assert isinstance(codec, WorldCodec)
    assert codec.content() == wanted.content()
    assert codec.eos_token_ids == (0,)
    # Ids of padding have no text, and their names are none of a text.
    assert len(codec.token_bytes) == 65530
    assert codec.encode("[PAD65530]<s>") == wanted.encode("[PAD65530]<s>")


@given(st.binary(max_size=30))
def test_escapes_are_undone(token: bytes) -> None:
    assert unescaped(escaped(token)) == token


def test_other_escapes_drop_the_backslash() -> None:
    assert unescaped(rb"\'a\"\\b\q") == b"'a\"\\bq"
    assert unescaped(rb"\x0") == b"x0"
    assert unescaped(b"a\\") == b"a"


def test_byte_level_is_the_file_it_came_from() -> None:
    codec = read(byte_level_metadata(), 300)
    assert isinstance(codec, LibraryCodec)
    assert codec.content() == tiny_tokenizer().content


def test_padded_ids_of_a_byte_level_vocabulary_have_no_text() -> None:
    metadata = byte_level_metadata()
    metadata[P + "tokens"] += [b"[PAD300]", b"[PAD301]"]
    metadata[P + "token_type"] = np.append(metadata[P + "token_type"], [UNUSED, UNUSED])
    codec = read(metadata, 302)
    assert codec is not None
    assert len(codec.token_bytes) == 300


def test_added_tokens_are_special_or_text() -> None:
    metadata = byte_level_metadata()
    metadata[P + "tokens"] += [b"<|turn|>", b"<tool>"]
    metadata[P + "token_type"] = np.append(metadata[P + "token_type"], [CONTROL, USER])
    codec = read(metadata, 302)
    assert codec is not None
    assert set(codec.special) == {0, 300}
    assert codec.token_bytes[300:] == [b"", b"<tool>"]


#: Contractions, accents as characters of their own, digits, several spaces and line breaks.
AWKWARD = (
    "I'll  say it'S  1234567 times\r\n\r\n  x = [1,2];\n\n\n",
    "cafe\u0301 \u0928\u092e\u0938\u094d\u0924\u0947 \u0e01\u0e33",
    "\u00bd\u0663\u0664 a\u0301b!?\u0301",
    "  \t once\u00a0upon\u2028a time\u3000 \U0001f44d\U0001f3fd ",
)


@pytest.mark.parametrize("text", AWKWARD)
@pytest.mark.parametrize(
    ("pre", "theirs"), [("qwen35", Qwen3_5Tokenizer), ("qwen2", Qwen2Tokenizer)]
)
def test_qwen_cuts_texts_as_transformers(pre: str, theirs: Any, text: str) -> None:
    values = json.loads(tiny_tokenizer().content)["model"]
    merges = [tuple(merge) for merge in values["merges"]]
    wanted = theirs(vocab=values["vocab"], merges=merges)
    codec = read(byte_level_metadata() | {P + "pre": pre}, 300)
    assert isinstance(codec, LibraryCodec)
    assert codec.encode(text) == wanted(text)["input_ids"]
    found, inside = Backend.from_str(codec.content()), wanted.backend_tokenizer
    assert words(found, text) == words(inside, text)
    assert b"".join(codec.token_bytes[id] for id in codec.encode_exact(text)) == text.encode()


def words(backend: Backend, text: str) -> list[tuple[str, tuple[int, int]]]:
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    assert backend.pre_tokenizer is not None
    return list(backend.pre_tokenizer.pre_tokenize_str(text))


@pytest.mark.parametrize("pre", ["mpt", "olmo"])
@pytest.mark.parametrize("text", AWKWARD)
def test_gpt_neox_cuts_texts_as_transformers(pre: str, text: str) -> None:
    values = json.loads(tiny_tokenizer().content)["model"]
    merges = [tuple(merge) for merge in values["merges"]]
    wanted = GPTNeoXTokenizer(vocab=values["vocab"], merges=merges)
    codec = read(byte_level_metadata() | {P + "pre": pre}, 300)
    assert isinstance(codec, LibraryCodec)
    assert codec.encode(text) == wanted(text)["input_ids"]
    found = Backend.from_str(codec.content())
    assert words(found, text) == words(wanted.backend_tokenizer, text)


#: One after the other, each on what the last one left whole: `src/llama-vocab.cpp` of llama.cpp.
LLAMA_CUTS_FALCON = (
    r"[\p{P}\$\+<=>\^~\|`]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"[0-9][0-9][0-9]",
)


def llama_starts(text: str) -> set[int]:
    """Where words of Falcon begin by llama.cpp."""
    steps = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in LLAMA_CUTS_FALCON]
    found = pre_tokenizers.Sequence(steps).pre_tokenize_str(text)
    return {begin for _, (begin, _) in found}


@pytest.mark.parametrize("text", [*AWKWARD, "f(x)=$12.50;  1234567 12345 + ~~a''b ..."])
def test_falcon_cuts_texts_as_llama_cpp(text: str) -> None:
    """And cuts digits from what is around them, as its file says: it has no token of both.

    Characters are those that bytes are written as, of which some are digits: of 0xB3, for one.
    """
    codec = read(byte_level_metadata() | {P + "pre": "falcon"}, 300)
    assert isinstance(codec, LibraryCodec)
    found = words(Backend.from_str(codec.content()), text)
    theirs = llama_starts(text)
    assert theirs <= {begin for _, (begin, _) in found}
    for (before, _), (word, (begin, _)) in pairwise(found):
        assert begin in theirs or before[-1].isnumeric() != word[0].isnumeric()


def test_falcon_cuts_punctuation_and_digits_by_threes() -> None:
    codec = read(byte_level_metadata() | {P + "pre": "falcon"}, 300)
    assert isinstance(codec, LibraryCodec)
    found = words(Backend.from_str(codec.content()), "I'll pay $1234567.50")
    pieces = ["I", "'", "ll", "\u0120pay", "\u0120", "$", "123", "456", "7", ".", "50"]
    assert [word for word, _ in found] == pieces


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "refact"])
def test_smollm_cuts_each_digit(pre: str) -> None:
    codec = read(byte_level_metadata() | {P + "pre": pre}, 300)
    assert isinstance(codec, LibraryCodec)
    found = words(Backend.from_str(codec.content()), "I'll pay 2024.5")
    pieces = ["I", "'ll", "\u0120pay", "\u0120", "2", "0", "2", "4", ".", "5"]
    assert [word for word, _ in found] == pieces


@pytest.mark.parametrize("pre", ["tekken", "pixtral"])
def test_tekken_cuts_before_capitals_and_each_digit(pre: str) -> None:
    codec = read(byte_level_metadata() | {P + "pre": pre}, 300)
    assert isinstance(codec, LibraryCodec)
    found = words(Backend.from_str(codec.content()), "I'LL say iPhone 12/7//\n\u00e9a")
    pieces = ["I", "'LL", "\u0120say", "\u0120i", "Phone", "\u0120", "1", "2", "/", "7", "//\u010a"]
    assert [word for word, _ in found] == [*pieces, "\u00c3\u00a9a"]


@pytest.mark.parametrize("pre", ["lfm2", "llama-bpe", "dbrx", "falcon-h1"])
def test_lfm2_cuts_texts_as_llama_3(pre: str) -> None:
    """Digits by threes; accents are no letters."""
    codec = read(byte_level_metadata() | {P + "pre": pre}, 300)
    assert isinstance(codec, LibraryCodec)
    found = words(Backend.from_str(codec.content()), "I'LL say 1234567\n\n\n  a.b  ")
    pieces = ["I", "'LL", "\u0120say", "\u0120", "123", "456", "7", "\u010a\u010a\u010a"]
    assert [word for word, _ in found] == [*pieces, "\u0120", "\u0120a", ".b", "\u0120\u0120"]


def test_word_of_lfm2_that_is_a_token_needs_no_merges() -> None:
    metadata = byte_level_metadata()
    metadata[P + "tokens"] += [b"zqx"]
    metadata[P + "token_type"] = np.append(metadata[P + "token_type"], [NORMAL])
    for pre, is_whole in (("lfm2", True), ("qwen35", False), ("dbrx", False), ("tekken", True)):
        codec = read(metadata | {P + "pre": pre}, 301)
        assert codec is not None
        assert (codec.encode("zqx") == [300]) == is_whole


def test_chat_models_end_turns_and_documents_whatever_the_file_names() -> None:
    metadata = byte_level_metadata()
    metadata[P + "tokens"] += [b"<|im_end|>", b"<|im_start|>"]
    metadata[P + "token_type"] = np.append(metadata[P + "token_type"], [CONTROL, CONTROL])
    for end, ids in ((0, (0, 300)), (300, (300, 0))):
        codec = read(metadata | {P + "eos_token_id": end}, 302)
        assert codec is not None
        assert codec.eos_token_ids == ids


@pytest.mark.parametrize("metadata", [{}, {P + "model": "no_vocab"}])
def test_file_may_have_none(metadata: dict[str, Any]) -> None:
    assert read(metadata, 300) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported, only rwkv, gpt2, llama"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing, or no array of strings"),
        ({"tokens": [b"<s>"]}, "tokenizer.ggml.tokens has 1 ids, the model 257"),
        (
            {"token_type": np.ones(3, np.int32)},
            "tokenizer.ggml.token_type has 3 ids, the model 257",
        ),
        ({"token_type": [b"1"]}, "tokenizer.ggml.token_type is not an array of integers"),
        (
            {"token_type": np.full(257, np.nan)},
            "tokenizer.ggml.token_type is not an array of integers",
        ),
        ({"tokens": [b"<s>"] * 257}, "two ids have the same bytes"),
        ({"tokens": [b"<s>", b"", *[b"x"] * 255]}, "id 1 of b'' is"),
    ],
)
def test_broken_vocabulary_is_named(change: dict[str, Any], message: str) -> None:
    changed = {P + name: value for name, value in change.items()}
    metadata = {k: v for k, v in (world_metadata(BYTES, 257) | changed).items() if v is not None}
    with pytest.raises(TokenizerError, match=message):
        read(metadata, 257)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "gpt-4o"}, "tokenizer.ggml.pre 'gpt-4o' is not supported, only gpt-2, "),
        ({"pre": None}, "tokenizer.ggml.pre 'default' is not supported"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": [b"q"]}, "tokenizer.ggml.merges: "),
        ({"merges": [b"nowhere else"]}, "tokenizer.ggml.merges: "),
        ({"tokens": [b"\xff"] * 300}, "tokenizer.ggml.tokens or merges are not UTF-8"),
        ({"tokens": [b"a"] * 300}, "two ids have the token 'a'"),
    ],
)
def test_broken_byte_level_vocabulary_is_named(change: dict[str, Any], message: str) -> None:
    changed = {P + name: value for name, value in change.items()}
    metadata = {k: v for k, v in (byte_level_metadata() | changed).items() if v is not None}
    with pytest.raises(TokenizerError, match=message):
        read(metadata, 300)
