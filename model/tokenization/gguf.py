"""The tokenizer inside a GGUF file, from its metadata ``tokenizer.ggml.*``.

Three kinds are read: RWKV's vocabulary (``rwkv``), whose tokens are written as Python writes bytes,
byte-level BPE (``gpt2``) with the ways to cut a text of `model.tokenization.cuts`, and
SentencePiece's BPE (``llama``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from model.tokenization.base import Codec, TokenizerError
from model.tokenization.cuts import CUTS
from model.tokenization.ends import NO_ENDS, Ends
from model.tokenization.library import LibraryCodec
from model.tokenization.sentencepiece import sentencepiece
from model.tokenization.world import WorldCodec

_PREFIX = "tokenizer.ggml."
#: Of ``tokenizer.ggml.model``.
KINDS = ("rwkv", "gpt2", "llama")
#: Says that a file has no tokenizer.
NO_VOCAB = "no_vocab"
#: Types of tokens. The others have no text.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.?))", re.DOTALL)
_LETTERS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def read_gguf_codec(
    metadata: Mapping[str, Any], arrays: Mapping[str, Any], vocab_size: int
) -> Codec | None:
    """The tokenizer of a model with ``vocab_size`` ids; None where the file has none.

    ``metadata`` and ``arrays`` are those of `model.weights.gguf_file.GgufFile`. Raises
    `TokenizerError` where it is damaged or of a kind that is not supported.
    """
    kind = metadata.get(_PREFIX + "model", NO_VOCAB)
    if kind == NO_VOCAB:
        return None
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise TokenizerError(f"{_PREFIX}model {kind!r:.80} is not supported, only {known}")
    tokens, types = _tokens(arrays, vocab_size)
    end = f"{_PREFIX}eos_token_id"
    ends = Ends(((metadata[end], end),)) if end in metadata else NO_ENDS
    if kind == "gpt2":
        return LibraryCodec(_byte_level(metadata, arrays, tokens, types), ends)
    if kind == "llama":
        return LibraryCodec(_sentencepiece(metadata, arrays, tokens, types), ends)
    normal = (id for id, type in enumerate(types) if type == NORMAL and id)
    return WorldCodec(((id, unescaped(tokens[id])) for id in normal), ends)


def _tokens(arrays: Mapping[str, Any], vocab_size: int) -> tuple[list[bytes], Sequence[int]]:
    """Tokens and their types, one of each for an id."""
    tokens = arrays.get(_PREFIX + "tokens")
    if not isinstance(tokens, list):
        raise TokenizerError(f"{_PREFIX}tokens is missing, or no array of strings")
    types = arrays.get(_PREFIX + "token_type")
    types = np.full(len(tokens), NORMAL) if types is None else types
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu":
        raise TokenizerError(f"{_PREFIX}token_type is not an array of integers")
    for name, values in (("tokens", tokens), ("token_type", types)):
        if len(values) != vocab_size:
            raise TokenizerError(f"{_PREFIX}{name} has {len(values)} ids, the model {vocab_size}")
    return tokens, [int(type) for type in types]


def unescaped(token: bytes) -> bytes:
    r"""What ``repr`` of bytes means: ``\t``, ``\n``, ``\r``, ``\xHH``, else the character."""
    if b"\\" not in token:
        return token

    def byte(match: re.Match[bytes]) -> bytes:
        code, letter = match.groups()
        return bytes([int(code, 16)]) if code else _LETTERS.get(letter, letter)

    return _ESCAPE.sub(byte, token)


def _sentencepiece(
    metadata: Mapping[str, Any],
    arrays: Mapping[str, Any],
    tokens: list[bytes],
    types: Sequence[int],
) -> str:
    scores = arrays.get(_PREFIX + "scores")
    if not isinstance(scores, np.ndarray) or scores.dtype.kind != "f" or len(scores) != len(tokens):
        raise TokenizerError(f"{_PREFIX}scores is not an array of {len(tokens)} numbers")
    in_front = metadata.get(_PREFIX + "add_space_prefix", True)
    return sentencepiece(tokens, types, scores, bool(in_front))


def escaped(token: bytes) -> bytes:
    """The reverse of `unescaped`, as Python writes bytes between its quotes."""
    return repr(token)[2:-1].encode()


def _byte_level(
    metadata: Mapping[str, Any],
    arrays: Mapping[str, Any],
    tokens: list[bytes],
    types: Sequence[int],
) -> str:
    """The ``tokenizer.json`` of a byte-level BPE that cuts texts in one of the ways of `CUTS`."""
    name = metadata.get(_PREFIX + "pre", "default")
    cut = CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        known = ", ".join(CUTS)
        raise TokenizerError(f"{_PREFIX}pre {name!r:.80} is not supported, only {known}")
    merges = arrays.get(_PREFIX + "merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{_PREFIX}merges is missing, or no array of strings")
    try:
        names = [token.decode() for token in tokens]
        pairs = [tuple(merge.decode().split(" ")) for merge in merges]
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{_PREFIX}tokens or merges are not UTF-8") from error
    ids: dict[str, int] = {}
    for id, name in enumerate(names):
        if name in ids:
            raise TokenizerError(f"two ids have the token {name!r}")
        if types[id] != UNUSED:
            ids[name] = id
    try:
        backend = Backend(models.BPE(vocab=ids, merges=pairs, ignore_merges=cut.whole_words))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{_PREFIX}merges: {error}") from error
    cut.apply(backend)
    backend.decoder = decoders.ByteLevel()
    for name, id in ids.items():
        if types[id] in (CONTROL, USER_DEFINED):
            special = types[id] == CONTROL
            backend.add_tokens([AddedToken(name, normalized=False, special=special)])
    return str(backend.to_str())
