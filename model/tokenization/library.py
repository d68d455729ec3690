"""Tokenizers in the format of the `tokenizers` library, ``tokenizer.json``.

Two kinds of file have exact bytes for every token. In **byte-level** ones (GPT-2, GPT-NeoX, Llama
3) a token is written in printable stand-ins for its bytes. In those with **byte fallback**
(SentencePiece's: Llama 2, Mistral) it is text with "▁" for a space, and a character without a token
is written in 256 tokens ``<0x00>`` to ``<0xFF>``. The others lose something, and are refused by
name.

The library encodes; the bytes of tokens come from their kind. A file may normalise a text and put a
space in front of it, so there are up to three of the library's tokenizers: that of the file, one
that puts no space in front, and one that does neither.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from model.tokenization.base import (
    END_OF_TEXT,
    MAX_TOKEN_BYTES,
    NO_ENDS,
    Encoded,
    Ends,
    KnownTexts,
    TokenizerError,
    resolve_ends,
)

SPACE = "▁"

Json = dict[str, Any]

_REFUSED_MODELS = {
    "WordPiece": "it drops spaces, and characters outside its vocabulary become [UNK]",
    "WordLevel": "words outside its vocabulary are lost",
}
#: Ways to cut a text before its parts are encoded that lose nothing of it.
_CUT_STEPS = ("ByteLevel", "Metaspace", "Split", "Punctuation", "Digits", "UnicodeScripts")


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
        if cut["type"] not in _CUT_STEPS or cut.get("behavior") == "Removed":
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


FILE = "tokenizer.json"
#: Ends a turn of ChatML.
TURN_END = "<|im_end|>"
#: Special tokens that are text in an answer: LFM2 and Nemotron write a list of calls between them.
#: A client's text still cannot have them.
SHOWN = frozenset(("<|tool_call_start|>", "<|tool_call_end|>", "<TOOLCALL>", "</TOOLCALL>"))

#: Of a text's last tokens, among which the end of its settled part is looked for.
MAX_UNSETTLED = 1024

#: Bounds on what a damaged file may allocate; the largest that are published have 260,000 ids in
#: 34 MB.
MAX_ID, MAX_FILE_BYTES = 1 << 20, 1 << 26


class LibraryCodec:
    """See `model.tokenization.base.Codec`. Raises `TokenizerError` or `ConfigError`."""

    kind = "tokenizer.json"
    aliases: dict[str, int] = {}  # noqa: RUF012 - a file names each id once

    def __init__(self, text: str, ends: Ends = NO_ENDS) -> None:
        values = parsed(text)
        check_bounds(values)
        self._kind = kind_of(values)
        backend = _backend(text)  # refuses values of other types than those that are read below
        vocabulary, added = backend.get_vocab(), backend.get_added_tokens_decoder()
        size = max(vocabulary.values(), default=-1) + 1
        self.eos_token_ids = _ends(backend, ends, size, added)
        ends_and_special = {
            id for id, token in added.items() if token.special or token.content in SHOWN
        }
        ends_and_special |= {id for id in self.eos_token_ids if id in added}
        ends_and_special.add(self.eos_token_ids[0])
        if not all(added[id].special for id in ends_and_special & added.keys()):
            # Else the library would find the names of ends in any text.
            for token in values["added_tokens"]:
                token["special"] = token["id"] in ends_and_special
            backend = _backend(_json(values))
        self._backend = self._continuing = backend
        if (continuing := _without_space(values)) != values:
            self._continuing = _backend(_json(continuing))
        exact = _exact(continuing)
        same = exact == continuing
        self._exact_backend = self._continuing if same else _backend(_json(exact))
        self.puts_space_in_front = self._continuing is not self._backend
        first = any(cut.get("prepend_scheme") == "first" for cut in _cuts(values))
        self._from_start: Callable[[str], list[int]] = partial(_ids, backend)
        self._in_midst: Callable[[str], list[int]] = partial(_ids, self._continuing)
        self._after_special: Callable[[str], list[int]]
        self._after_special = self._in_midst if first else self._from_start
        self.special = {
            id: added.get(id) or AddedToken(str(backend.id_to_token(id)), special=True)
            for id in ends_and_special
        }
        self._fill_tables(vocabulary, added, size)
        self._longest_name = max((len(token.content) for token in added.values()), default=0)
        if self._kind.fallback:
            self._byte_ids = byte_ids(self._kind, vocabulary)

    def _fill_tables(
        self, vocabulary: dict[str, int], added: dict[int, AddedToken], size: int
    ) -> None:
        self.token_bytes, self.first_bytes = [b""] * size, dict[int, bytes]()
        for token, id in vocabulary.items():
            if id in self.special:
                self.token_bytes[id] = token.encode() if token in SHOWN else b""
                continue
            if id in added and not self._kind.fallback:
                self.token_bytes[id] = token.encode()
                continue
            data = self.token_bytes[id] = bytes_of(self._kind, token)
            first = first_bytes_of(self._kind, token)
            if first != data:
                self.first_bytes[id] = first

    def encode(self, text: str) -> list[int]:
        """Ids of plain text that begins a text, as the file says."""
        return self._from_start(text)

    def encode_after_special(self, text: str) -> list[int]:
        """The same behind a special token, where a file may put no space in front."""
        return self._after_special(text)

    def encode_continuation(self, text: str) -> list[int]:
        """The same with no space in front."""
        return self._in_midst(text)

    def encode_exact(self, text: str) -> list[int]:
        """Ids whose bytes are those of ``text``."""
        if not self._kind.fallback or SPACE not in text:
            return self._exact(text)
        first, *rest = text.split(SPACE)
        ids = self._exact(first)
        for part in rest:
            ids += [*(self._byte_ids[byte] for byte in SPACE.encode()), *self._exact(part)]
        return ids

    def remembering(self) -> Self:
        """The same with a memory of its own for long texts."""
        codec = copy.copy(self)
        codec._in_midst = KnownTexts(self._in_midst, self.settled).encode
        if self.puts_space_in_front:  # behind added names as well, so that no part is settled
            whole = self._from_start
            codec._from_start = KnownTexts(whole, lambda text: Encoded(whole(text))).encode
        else:
            codec._from_start = codec._in_midst
        is_start = self._after_special is self._from_start
        codec._after_special = codec._from_start if is_start else codec._in_midst
        return codec

    def settled(self, text: str) -> Encoded:
        """Ids of what continues a text, and how much of it is settled."""
        (encoding,) = self._continuing.encode_batch([text], add_special_tokens=False)
        ids = list(encoding.ids)
        num_ids = self._num_settled(encoding, ids) if ids else 0
        rest = b"".join(self.token_bytes[id] for id in ids[num_ids:]).decode(errors="replace")
        if not num_ids or not text.endswith(rest):  # a normaliser has changed the end
            return Encoded(ids)
        return Encoded(ids, len(text) - len(rest), num_ids)

    def _num_settled(self, encoding: Encoding, ids: list[int]) -> int:
        """Number of ids that stay whatever follows the text; 0 where none is sure to.

        What follows can make the last word longer, and join it to spaces in front of it: so two
        words that are not spaces are behind the settled part. There is room for the longest added
        name as well, of which a text may end with the beginning. Digits are not cut, because a
        pattern may count them from behind.
        """
        num_words = num_bytes = 0
        is_space, word = True, encoding.token_to_word(len(ids) - 1)
        for place in range(len(ids) - 1, max(0, len(ids) - MAX_UNSETTLED), -1):
            data, before = self.token_bytes[ids[place]], encoding.token_to_word(place - 1)
            if word is None or before is None:
                return 0
            num_bytes += len(data)
            is_space = is_space and not data.strip()
            if before == word:
                continue
            num_words += not is_space
            is_space, word = True, before
            is_number = data[:1].isdigit() and self.token_bytes[ids[place - 1]][-1:].isdigit()
            if num_words >= 2 and num_bytes >= self._longest_name and not is_number:
                return place
        return 0

    def content(self) -> str:
        """The file, as the library writes it."""
        return str(self._backend.to_str())

    def _exact(self, text: str) -> list[int]:
        ids = _ids(self._exact_backend, text)
        data = b"".join(self.token_bytes[id] for id in ids)
        assert data == text.encode(), f"{text!r} is encoded as {data!r}"
        return ids


def parsed(text: str) -> Json:
    """Raises `TokenizerError` where the text is not an object with a model."""
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"is not JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        raise TokenizerError("is not a JSON object with a model")
    return values


def check_bounds(values: Json) -> None:
    """Raises `TokenizerError` for an id or a token that is too large; types are checked later."""
    vocabulary, added = values["model"].get("vocab"), values.get("added_tokens")
    tokens: list[Any] = []
    ids: list[Any] = []
    if isinstance(vocabulary, dict):
        tokens, ids = list(vocabulary), list(vocabulary.values())
    elif isinstance(vocabulary, list):
        tokens = [pair[0] for pair in vocabulary if isinstance(pair, list) and pair]
        ids = [len(vocabulary)]
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            tokens.append(token.get("content"))
            ids.append(token.get("id"))
    if any(isinstance(id, int) and not 0 <= id <= MAX_ID for id in ids):
        raise TokenizerError(f"an id is not in 0..{MAX_ID}")
    if any(isinstance(token, str) and len(token) > MAX_TOKEN_BYTES for token in tokens):
        raise TokenizerError(f"a token is longer than {MAX_TOKEN_BYTES:,} bytes")


def _backend(text: str) -> Backend:
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises bare Exception for a bad file
        raise TokenizerError(str(error)) from error
    # What is special comes from `Tokenizer.pieces`: the library would match names in any text.
    backend.encode_special_tokens = True
    # A file may hold how its tokenizer was called last; texts are neither cut nor filled up.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _ids(backend: Backend, text: str) -> list[int]:
    # The batch form releases the GIL, so that a long text stalls no other thread.
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


def _ends(backend: Backend, ends: Ends, size: int, added: dict[int, AddedToken]) -> tuple[int, ...]:
    """The ids that end a text, a special one first. Raises `TokenizerError` where none is named.

    Files of models that write ChatML may name the end of a document or that of a turn alone.
    """
    ids = resolve_ends(ends, size, backend.token_to_id)
    if backend.token_to_id(TURN_END) is not None:
        both = (backend.token_to_id(name) for name in (END_OF_TEXT, TURN_END))
        ids = list(dict.fromkeys([*ids, *(id for id in both if id is not None)]))
    if not ids:
        usual = backend.token_to_id(END_OF_TEXT)
        if usual is None:
            raise TokenizerError(
                f"no token ends a text: there is no {END_OF_TEXT!r}, and no eos_token_id in"
                " config.json or generation_config.json and no eos_token in tokenizer_config.json"
                " names another"
            )
        ids = [usual]
    return tuple(sorted(ids, key=lambda id: id not in added))


def _cuts(values: Json) -> list[Json]:
    return list(flat(values.get("pre_tokenizer"), "pretokenizers"))


def _without_space(values: Json) -> Json:
    """A copy without what puts a space in front of a text."""
    values = copy.deepcopy(values)
    for cut in _cuts(values):
        if cut["type"] == "Metaspace":
            cut.pop("add_prefix_space", None)  # of older files, next to the scheme or instead
            cut["prepend_scheme"] = "never"
        elif cut["type"] == "ByteLevel":
            cut["add_prefix_space"] = False
    steps = list(flat(values.get("normalizer"), "normalizers"))
    kept = [step for step in steps if step["type"] != "Prepend"]
    if kept != steps:
        values["normalizer"] = {"type": "Sequence", "normalizers": kept}
    return values


def _exact(values: Json) -> Json:
    """A copy that changes nothing of a text before it is encoded."""
    exact = copy.deepcopy(values)
    # Of a normalizer what writes spaces otherwise is left; nothing else keeps the bytes.
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = list(flat(exact.get("normalizer"), "normalizers"))
    if [spaces] != steps:
        exact["normalizer"] = spaces if spaces in steps else None
    for token in exact.get("added_tokens", ()):
        if not token.get("special"):
            token.update(lstrip=False, rstrip=False, normalized=False)
    return exact


def _json(values: Json) -> str:
    return json.dumps(values, ensure_ascii=False)
