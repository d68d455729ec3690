"""A SentencePiece vocabulary in its own file, ``tokenizer.model``, as a ``tokenizer.json``.

The file is a message of protobuf, ``ModelProto`` in SentencePiece's ``sentencepiece_model.proto``.
What is read of it: the pieces with their scores and types, which are those of GGUF, and of the
settings the kind of the model, the id that ends a text, and whether a space is put in front. Only
BPE without changes to the text is supported, as the vocabularies of Llama 2 and Mistral are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from model.tokenization.base import TokenizerError
from model.tokenization.gguf_sentencepiece import sentencepiece

#: What Mistral calls such files in its folders.
FILE, BEGINNING = "tokenizer.model.v3", "tokenizer.model"
#: Fields of the messages, and what some are where a file leaves them out.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _EOS_ID, _DEFAULT_EOS = 3, 42, 2
_CHANGES, _SPACE_IN_FRONT, _ONE_SPACE = 2, 3, 4
NORMAL, BPE = 1, 2

_MAX_VARINT_BYTES = 10

Value = int | bytes


def read_sentencepiece(data: bytes) -> tuple[str, int]:
    """The ``tokenizer.json`` of a file with ``data``, and the id that ends a text.

    Raises `TokenizerError` for a file that is damaged or of a kind that is not supported.
    """
    tokens, scores, types = [], [], []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    for field, value in _fields(data):
        if field == _PIECES:
            piece = dict(_fields(_message(value)))
            tokens.append(_message(piece.get(_PIECE, b"")))
            scores.append(_float(piece.get(_SCORE, b"\0\0\0\0")))
            types.append(_number(piece.get(_TYPE, NORMAL)))
        elif field == _TRAINER:
            trainer = dict(_fields(_message(value)))
        elif field == _NORMALIZER:
            normalizer = dict(_fields(_message(value)))
    if not tokens:
        raise TokenizerError("has no pieces: it is no vocabulary of SentencePiece")
    if trainer.get(_MODEL_TYPE, 1) != BPE:
        raise TokenizerError("is not supported: of SentencePiece only BPE is (model_type 2)")
    if normalizer.get(_CHANGES) or normalizer.get(_ONE_SPACE, 1):
        raise TokenizerError(
            "is not supported: it changes texts (precompiled_charsmap, remove_extra_whitespaces)"
        )
    in_front = bool(normalizer.get(_SPACE_IN_FRONT, 1))
    text = sentencepiece(tokens, types, np.array(scores, np.float32), in_front)
    return text, _number(trainer.get(_EOS_ID, _DEFAULT_EOS))


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The fields of a message by their numbers: integers, or bytes of what is not one."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        match key & 7:
            case 0:
                value, place = _varint(data, place)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, place = _varint(data, place)
            case 5:
                size = 4
            case other:
                raise TokenizerError(f"is damaged: a field of kind {other} at byte {place}")
        if place + size > len(data):
            raise TokenizerError(f"is damaged: a field ends {place + size - len(data)} bytes late")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """The integer at ``place``, and the place behind it."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if place + index >= len(data):
            break
        byte = data[place + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, place + index + 1
    raise TokenizerError(f"is damaged: no integer at byte {place}")


def _message(value: Value) -> bytes:
    if isinstance(value, int):
        raise TokenizerError("is damaged: an integer is in the place of a message")
    return value


def _number(value: Value) -> int:
    if not isinstance(value, int):
        raise TokenizerError("is damaged: no integer where one must be")
    return value


def _float(value: Value) -> float:
    if isinstance(value, int) or len(value) != 4:
        raise TokenizerError("is damaged: a score is no 32-bit number")
    (number,) = struct.unpack("<f", value)
    return float(number)
