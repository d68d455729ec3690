"""SentencePiece's BPE as a ``tokenizer.json``: from its own file, or as GGUF has it.

The file, ``tokenizer.model``, is a message of protobuf, ``ModelProto`` in SentencePiece's
``sentencepiece_model.proto``.
What is read of it: the pieces with their scores and types, which are those of GGUF, and of the
settings the kind of the model, the id that ends a text, and whether a space is put in front. Only
BPE without changes to the text is supported, as the vocabularies of Llama 2 and Mistral are.

Both (GGUF's ``tokenizer.ggml.model`` "llama") have the score of each token and no merges: of two
neighbours whose join is a token, those with the best score are joined first. So every way to cut a
token into two others is a merge, in the order of the scores. A character without a token is written
in tokens of bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from model.tokenization.base import TokenizerError
from model.tokenization.library import SPACE

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


#: Types of tokens, next to those of `model.tokenization.gguf`.
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5


def sentencepiece(
    tokens: Sequence[bytes],
    types: Sequence[int],
    scores: npt.NDArray[np.float32],
    has_space_in_front: bool,
) -> str:
    """The ``tokenizer.json``; one of each for an id. Raises `TokenizerError`."""
    names = _names(tokens)
    ids = {name: id for id, name in enumerate(names) if types[id] != UNUSED}
    unknown = [name for name, id in ids.items() if types[id] == UNKNOWN]
    if not unknown:
        raise TokenizerError("tokenizer.ggml.token_type has no unknown token")
    pieces = {name: id for name, id in ids.items() if types[id] not in (UNKNOWN, CONTROL)}
    backend = Backend(
        models.BPE(
            ids,
            _merges(pieces, scores),
            unk_token=unknown[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_space_in_front:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    for name, id in ids.items():
        if types[id] in (UNKNOWN, CONTROL, USER_DEFINED):
            special = types[id] != USER_DEFINED
            backend.add_tokens([AddedToken(name, normalized=False, special=special)])
    return str(backend.to_str())


def _names(tokens: Sequence[bytes]) -> list[str]:
    try:
        names = [token.decode() for token in tokens]
    except UnicodeDecodeError as error:
        raise TokenizerError("tokenizer.ggml.tokens are not UTF-8") from error
    if len(set(names)) < len(names):
        raise TokenizerError("two ids have the same token")
    return names


def _merges(ids: Mapping[str, int], scores: npt.NDArray[np.float32]) -> list[tuple[str, str]]:
    """Best score first; of one token, by the ids of its parts."""
    found = [
        (-float(scores[id]), id, ids[left], ids[right], (left, right))
        for name, id in ids.items()
        for left, right in ((name[:at], name[at:]) for at in range(1, len(name)))
        if left in ids and right in ids
    ]
    return [pair for *_, pair in sorted(found)]
