"""Tokenizers inside GGUF files: the same ids and bytes as from their own files."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("metadata", [{}, {P + "model": "no_vocab"}])
def test_file_may_have_none(metadata: dict[str, Any]) -> None:
    assert read(metadata, 300) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model 'llama' is not supported, only rwkv and gpt2"),
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
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre 'llama-bpe' is not supported, only 'gpt-2'"),
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
