"""Files of SentencePiece are read as its own schema of protobuf writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.tokenization.base import TokenizerError
from model.tokenization.sentencepiece import read_sentencepiece
from model.tokenizer import Tokenizer
from tests.model.tokenization.files import llama, llama_tokenizer, schema, sentencepiece_file

BPE, UNIGRAM = 2, 1


def message(**change: Any) -> Any:
    """The file of `llama`; ``change`` has other values of its two settings' fields."""
    found = schema.ModelProto.FromString(sentencepiece_file())
    for name, value in change.items():
        inside = found.trainer_spec
        if name not in inside.DESCRIPTOR.fields_by_name:
            inside = found.normalizer_spec
        setattr(inside, name, value)
    return found


@pytest.mark.parametrize("text", ["Once upon a time", "  twice  upon", "", " ", "\u6f22<s>\n"])
def test_file_is_the_tokenizer_of_its_pieces(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.model.v3"
    path.write_bytes(sentencepiece_file())
    ours = Tokenizer.load(path)
    assert ours.encode(text) == llama_tokenizer().encode(text)
    assert ours.decode(ours.encode(text)) == llama_tokenizer().decode(ours.encode(text))
    assert ours.special_ids == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert ours.eos_token_ids == (2,)
    assert ours.vocab_size == len(json.loads(llama())["model"]["vocab"])


def test_file_says_what_ends_a_text_and_whether_a_space_begins_it(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(message(eos_id=1, add_dummy_prefix=False).SerializeToString())
    ours = Tokenizer.load(path)
    assert ours.eos_token_ids == (1,)
    assert not ours.puts_space_in_front
    assert llama_tokenizer().puts_space_in_front
    config = {"eos_token_id": [2, 1]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert Tokenizer.load(path).eos_token_ids == (2, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": UNIGRAM}, "of SentencePiece only BPE is"),
        ({"precompiled_charsmap": b"x"}, "it changes texts"),
        ({"remove_extra_whitespaces": True}, "it changes texts"),
        ({"eos_id": 4000}, "eos_token_id must be in"),
    ],
)
def test_other_kinds_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(message(**change).SerializeToString())
    with pytest.raises(ValueError, match=reason):
        Tokenizer.load(path)


def test_damaged_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    data = sentencepiece_file()
    for size in [*range(40), *range(len(data) - 40, len(data))]:
        with pytest.raises(TokenizerError):
            read_sentencepiece(data[:size])
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data[:100])
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: is damaged"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 20,  # an integer without an end
        b"\x0b",  # a field of a kind that there is not
        b"\x08\x01",  # an integer in the place of a piece
        b"\x0a\x02\x08\x01",  # an integer in the place of a piece's text
        b"\x0a\x07\x11" + b"\0" * 6,  # a number of 64 bits that is cut
        b"\x0a\x0a\x11" + b"\0" * 9,  # one in the place of a score
        b"\x0a\x03\x1a\x01a",  # a text in the place of a type
    ],
)
def test_fields_of_other_kinds_are_refused(data: bytes) -> None:
    with pytest.raises(TokenizerError, match="is damaged"):
        read_sentencepiece(data)
