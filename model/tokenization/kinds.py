"""Which ``tokenizer.json`` have exact bytes for every token, and what these are.

Two kinds do. In **byte-level** ones (GPT-2, GPT-NeoX, Llama 3) a token is written in printable
stand-ins for its bytes. In those with **byte fallback** (SentencePiece's: Llama 2, Mistral) it
is text with "▁" for a space, and a character without a token is written in 256 tokens
``<0x00>`` to ``<0xFF>``. The others lose something, and are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from model.tokenization.base import TokenizerError

SPACE = "▁"

Json = dict[str, Any]

_REFUSED_MODELS = {
    "WordPiece": "it drops spaces, and characters outside its vocabulary become [UNK]",
    "WordLevel": "words outside its vocabulary are lost",
}
#: Ways to cut a text before its parts are encoded that lose nothing of it.
_CUTS = ("ByteLevel", "Metaspace", "Split", "Punctuation", "Digits", "UnicodeScripts")


@dataclass(frozen=True)
class Kind:
    """``fallback`` or byte-level; ``first`` is what a decoder drops at the start of a text.

    "space": one space. "spaces": all spaces of the first token, as a Metaspace decoder does.
    """

    fallback: bool
    first: Literal["", "space", "spaces"] = ""


def kind_of(values: Json) -> Kind:
    """The kind of a ``tokenizer.json``.

    Raises `TokenizerError` for one that loses text, or has values of other types.
    """
    try:
        return _kind_of(values)
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise TokenizerError(
            f"model, pre_tokenizer or decoder is not as the format has it: {error!r}"
        ) from error


def _kind_of(values: Json) -> Kind:
    model = values["model"]
    name = model.get("type") or ("BPE" if "merges" in model else "without a type")
    if name not in ("BPE", "Unigram"):
        why = _REFUSED_MODELS.get(name, "only BPE and Unigram are")
        raise TokenizerError(f"model {name} is not supported: {why}")
    for field in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            raise TokenizerError(f"model.{field} {model[field]!r} is not supported: it is not text")
    for cut in flat(values.get("pre_tokenizer"), "pretokenizers"):
        if cut["type"] not in _CUTS or cut.get("behavior") == "Removed":
            raise TokenizerError(f"pre_tokenizer {cut['type']} is not supported: it drops text")
    steps = list(flat(values.get("decoder"), "decoders"))
    names = [step["type"] for step in steps]
    if name == "BPE" and not model.get("byte_fallback") and names in ([], ["ByteLevel"]):
        return Kind(fallback=False)
    if not model.get("byte_fallback") or "ByteFallback" not in names:
        raise TokenizerError(
            f"model {name} is not byte-level and has no byte fallback, in model and decoder:"
            " characters outside its vocabulary are lost"
        )
    return Kind(fallback=True, first=_first(steps))


def _first(steps: list[Json]) -> Literal["", "space", "spaces"]:
    """What the steps of a decoder with byte fallback drop at the start of a text."""
    replace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    spaces, *rest = steps
    strip = rest.pop() if rest and rest[-1]["type"] == "Strip" else None
    if [step["type"] for step in rest] != ["ByteFallback", "Fuse"][: max(1, len(rest))]:
        raise _decoder(steps)
    if strip not in (None, {"type": "Strip", "content": " ", "start": 1, "stop": 0}):
        raise _decoder(steps)
    if strip is not None and len(rest) < 2:  # each token would be stripped
        raise _decoder(steps)
    if spaces == replace:
        return "space" if strip else ""
    if spaces["type"] == "Metaspace" and spaces["replacement"] == SPACE and strip is None:
        return "" if spaces.get("prepend_scheme") == "never" else "spaces"
    raise _decoder(steps)


def _decoder(steps: list[Json]) -> TokenizerError:
    names = ", ".join(step["type"] for step in steps)
    return TokenizerError(
        f"decoder [{names}] is not supported: only Replace {SPACE!r} by a space or Metaspace, then"
        " ByteFallback, Fuse and perhaps Strip of one space"
    )


def flat(step: Json | None, field: str) -> Iterator[Json]:
    """A step of the pipeline, or those of a Sequence; none for null."""
    if step is None:
        return
    if step["type"] == "Sequence":
        for inner in step[field]:
            yield from flat(inner, field)
    else:
        yield step


def bytes_of(kind: Kind, token: str) -> bytes:
    """The bytes of a token of the model. Raises `TokenizerError` where it has none."""
    if not kind.fallback:
        try:
            return bytes(_BYTE_OF[char] for char in token)
        except KeyError:
            raise TokenizerError(f"token {token!r} is not byte-level") from None
    if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):
        return bytes.fromhex(byte[1])
    return token.replace(SPACE, " ").encode()


def first_bytes_of(kind: Kind, token: str) -> bytes:
    """The bytes of a token that is the first of a text."""
    if kind.first == "spaces":
        return bytes_of(kind, token.replace(SPACE, ""))
    data = bytes_of(kind, token)
    return data.removeprefix(b" ") if kind.first == "space" else data


def byte_ids(kind: Kind, vocabulary: Mapping[str, int]) -> list[int]:
    """The id of each byte. Raises `TokenizerError` where one has none."""
    char_of = {byte: char for char, byte in _BYTE_OF.items()}
    names = [f"<0x{byte:02X}>" if kind.fallback else char_of[byte] for byte in range(256)]
    missing = [name for name in names if name not in vocabulary]
    if missing:
        raise TokenizerError(f"the vocabulary has no token {missing[0]!r} for a byte")
    return [vocabulary[name] for name in names]


def _byte_characters() -> dict[int, str]:
    """GPT-2's map: printable Latin-1 bytes map to themselves, the rest from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(0x100 + offset) for offset, byte in enumerate(others)})
    return table


_BYTE_OF = {char: byte for byte, char in _byte_characters().items()}
