"""SentencePiece vocabularies in GGUF encode as their scores say, and keep every byte."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from model.tokenization.base import TokenizerError
from model.tokenization.gguf import read_gguf_codec
from model.tokenization.library import LibraryCodec
from tests.model.tokenization.files import TEXTS, llama

P = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
SPACE = "▁"


def metadata(**change: Any) -> dict[str, Any]:
    """Of `llama`: the later a token was learnt, the lower is its score."""
    vocabulary = json.loads(llama())["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    types = [BYTE if name.startswith("<0x") else kinds.get(name, NORMAL) for name in names]
    values = {
        "model": "llama",
        "tokens": [name.encode() for name in names],
        "token_type": np.array(types, np.int32),
        "scores": -np.arange(len(names), dtype=np.float32),
        "eos_token_id": 2,
        **change,
    }
    return {P + key: value for key, value in values.items() if value is not None}


def read(**change: Any) -> LibraryCodec:
    values = metadata(**change)
    arrays = {key: v for key, v in values.items() if isinstance(v, list | np.ndarray)}
    rest = {key: v for key, v in values.items() if key not in arrays}
    codec = read_gguf_codec(rest, arrays, len(metadata()[P + "tokens"]))
    assert isinstance(codec, LibraryCodec)
    return codec


CODEC = read()


def by_scores(text: str) -> list[str]:
    """Joins the best neighbours, the leftmost of equals, until none are a token."""
    names = [name.decode() for name in metadata()[P + "tokens"]]
    score = {name: -id for id, name in enumerate(names)}
    parts = list((SPACE + text.replace(" ", SPACE)) if text else "")
    while True:
        pairs = [(score.get(a + b), -at) for at, (a, b) in enumerate(itertools.pairwise(parts))]
        known = [pair for pair in pairs if pair[0] is not None]
        if not known:
            return parts
        at = -max(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.parametrize(
    "text",
    ["Once upon a time", " twice  upon", "the fox and the wind", "every evening she told the fire"],
)
def test_neighbours_with_the_best_score_are_joined_first(text: str) -> None:
    names = [name.decode() for name in metadata()[P + "tokens"]]
    assert [names[id] for id in CODEC.encode(text)] == by_scores(text)


@given(TEXTS)
def test_every_byte_is_kept(text: str) -> None:
    ids = CODEC.encode_exact(text)
    assert b"".join(CODEC.token_bytes[id] for id in ids) == text.encode()


def test_space_in_front_is_that_of_the_file() -> None:
    names = [name.decode() for name in metadata()[P + "tokens"]]
    assert names[CODEC.encode("the")[0]].startswith(SPACE)
    assert not names[read(add_space_prefix=False).encode("the")[0]].startswith(SPACE)


def test_end_of_a_text_is_that_of_the_file_and_special_tokens_are_no_text() -> None:
    assert CODEC.eos_token_ids == (2,)
    assert CODEC.encode("</s>") != [2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is not an array of"),
        ({"scores": np.zeros(3, np.float32)}, "tokenizer.ggml.scores is not an array of"),
        ({"scores": np.zeros(409, np.int32)}, "tokenizer.ggml.scores is not an array of"),
        ({"token_type": None}, "has no unknown token"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        read(**change)
