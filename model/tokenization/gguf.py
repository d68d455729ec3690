"""The tokenizer inside a GGUF file, from its metadata ``tokenizer.ggml.*``.

Three kinds are read: RWKV's vocabulary (``rwkv``), whose tokens are written as Python writes bytes,
byte-level BPE (``gpt2``), and SentencePiece's BPE (``llama``). How byte-level tokenizers cut a text
into words has a name in GGUF (`CUTS`); the patterns are those of the published ``tokenizer.json``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from model.tokenization.base import NO_ENDS, Codec, Ends, TokenizerError
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


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Cut:
    """``pattern`` matches a word; without one it is GPT-2's.

    ``whole_words``: a word that is a token becomes it without merges. ``composed``: a text is
    normalised to NFC. ``falcon``: runs of punctuation are words, and so are runs of digits, three
    at a time. ``single_digits``: each digit is a word, before anything else is cut.
    """

    pattern: str = ""
    whole_words: bool = False
    composed: bool = False
    falcon: bool = False
    single_digits: bool = False

    def apply(self, backend: Backend) -> None:
        """Sets what comes before the merges."""
        if self.composed:
            backend.normalizer = normalizers.NFC()
        if self.falcon:
            backend.pre_tokenizer = pre_tokenizers.Sequence(_falcon())
            return
        if not self.pattern:
            of_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
            digits = pre_tokenizers.Digits(individual_digits=True)
            both = pre_tokenizers.Sequence([digits, of_gpt2])
            backend.pre_tokenizer = both if self.single_digits else of_gpt2
            return
        words = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])


def _falcon() -> list[pre_tokenizers.PreTokenizer]:
    """The steps of Falcon's file: the digits are cut out after the bytes became characters."""
    return [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
    ]


def _pattern(letters: str, digits: str) -> str:
    """Words of ``letters``, which may have one other character in front, and ``digits``."""
    others = rf" ?[^\s{letters}\p{{N}}]+[\r\n]*"
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
    return f"{_CONTRACTIONS}|{word}|{digits}|{others}|{_SPACES}"


def _tekken() -> str:
    """Words begin at a capital after small letters; each digit is a word."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    first = r"[^\r\n\p{L}\p{N}]?"
    words = f"{first}[{upper}]*[{lower}]+|{first}[{upper}]+[{lower}]*"
    return rf"{words}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


#: ``tokenizer.ggml.pre`` -> how to cut.
CUTS = {
    "gpt-2": Cut(),
    **dict.fromkeys(("mpt", "olmo"), Cut(composed=True)),  # of GPT-NeoX-20B, under either name
    "qwen2": Cut(_pattern(r"\p{L}", r"\p{N}"), composed=True),
    "qwen35": Cut(_pattern(r"\p{L}\p{M}", r"\p{N}"), composed=True),
    "falcon": Cut(falcon=True),
    # Of StarCoder's vocabularies, which Granite 3 has, under the name of one of them.
    **dict.fromkeys(("smollm", "starcoder", "refact"), Cut(single_digits=True)),
    "llama-bpe": Cut(_pattern(r"\p{L}", r"\p{N}{1,3}"), whole_words=True),
    # As llama.cpp cuts Falcon-H1's texts.
    "falcon-h1": Cut(_pattern(r"\p{L}", r"\p{N}{1,3}"), whole_words=True),
    # Of Mistral's vocabularies, which Nemotron-H has, under the name of one of them.
    **dict.fromkeys(("tekken", "pixtral"), Cut(_tekken(), whole_words=True)),
    "dbrx": Cut(_pattern(r"\p{L}", r"\p{N}{1,3}")),  # of GPT-4, as Granite 4.0 has it
    "lfm2": Cut(_pattern(r"\p{L}", r"\p{N}{1,3}"), whole_words=True),
}
