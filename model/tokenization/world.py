"""RWKV's World tokenizer, from its own file or a ``tokenizer.json``.

A vocabulary in its format may also be that of the 256 bytes (`BytesCodec`): an id is its byte, as
models have it that read bytes. Id 0 ends a text, so that a text cannot have the byte 0: it is
encoded as a space.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken

from model.files import read_text
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
from model.tokenization.library import Kind, bytes_of, check_bounds, parsed

# -------------------------------------------------------------------------------------------------
# RWKV's World tokenizer: at each place of the UTF-8 bytes, the longest token that fits.
#
# Its file, ``rwkv_vocab_v20230424.txt``, has a line ``id literal length`` for each token: the
# literal is Python's, of a str or of bytes, and the length is that of the token in bytes. Id 0 is
# not in it: it ends a text. The 256 single bytes are tokens, so that every byte sequence has ids.
#
# Repositories of native files leave it out, so the one that all published models share lies next to
# this module: the RWKV project's, under Apache-2.0, with line ends of one byte.


FILE = "rwkv_vocab_v20230424.txt"
PUBLISHED = Path(__file__).with_name(FILE)
EOS = 0
#: What folders of fla-hub, and files made of them, call the id 0 in their templates.
OTHER_END = "<|rwkv_tokenizer_end_of_text|>"

#: Rows of the embedding in published checkpoints: the file's 65,529 ids, that of the end, padding.
PADDED_SIZE = 1 << 16

#: No published vocabulary comes near: the largest has 65,529 tokens of 0.4 MB in a file of 1.1 MB,
#: and its longest token has 128 bytes. Each byte may become a dictionary.
MAX_ID, MAX_FILE_BYTES, MAX_BYTES = 1 << 20, 1 << 24, 1 << 21

#: The line for id 0 that a vocabulary of bytes may have.
END_AS_BYTE = (r"0 '\x00' 1", r"0 b'\x00' 1")

#: Characters of a token in the file: each byte is four at most, between b'' and ''.
MAX_LITERAL = 4 * MAX_TOKEN_BYTES + 3

#: Key of a node's own id. Bytes are 0..255.
_ID = -1


class WorldCodec:
    """The tokenizer of ``(id, bytes)`` pairs. Raises `TokenizerError` for other values.

    ``ends`` may name further ids that end a text. That of an empty line does not count: many
    texts have one, and the models end theirs by id 0.
    """

    kind = "RWKV vocabulary"
    puts_space_in_front = False
    first_bytes: dict[int, bytes] = {}  # noqa: RUF012 - nothing is put in front of a text
    aliases = {OTHER_END: EOS}  # noqa: RUF012 - never changed

    def __init__(self, tokens: Iterable[tuple[int, bytes]], ends: Ends = NO_ENDS) -> None:
        self._by_id = _checked(tokens)
        self.token_bytes = [self._by_id.get(id, b"") for id in range(max(self._by_id) + 1)]
        self.special = {EOS: AddedToken(END_OF_TEXT, special=True)}
        # Published configs name "\\n\\n" as an end and mean an id that is not in the file: the ids
        # of padding and all names are passed over, as are single bytes: 1 and 2 are the defaults
        # of configs that were made for another tokenizer.
        others = resolve_ends(Ends(ends.ids), max(PADDED_SIZE, len(self.token_bytes)), int)
        others = [id for id in others if len(self._by_id.get(id, b"").strip()) > 1]
        self.eos_token_ids = (EOS, *dict.fromkeys(others))
        self._trie = _trie(self._by_id)
        self._longest = max(map(len, self.token_bytes))
        self._encode: Callable[[str], list[int]] = lambda text: self.encode_bytes(text.encode())

    def encode(self, text: str) -> list[int]:
        """Ids whose bytes are those of ``text``, at its beginning or anywhere."""
        return self._encode(text)

    encode_after_special = encode_continuation = encode_exact = encode

    def remembering(self) -> Self:
        """The same with a memory of its own for long texts."""
        codec = copy.copy(self)
        codec._encode = KnownTexts(self._encode, self.settled).encode
        return codec

    def settled(self, text: str) -> Encoded:
        """The same, and how much of it is settled: tokens with room for the longest behind them."""
        data = text.encode()
        ids = self.encode_bytes(data)
        num_ids, behind = len(ids), 0
        while num_ids and behind < self._longest:
            num_ids -= 1
            behind += len(self.token_bytes[ids[num_ids]])
        # A token may end within a character.
        while num_ids and data[len(data) - behind] & 0xC0 == 0x80:
            num_ids -= 1
            behind += len(self.token_bytes[ids[num_ids]])
        settled = data[: len(data) - behind] if num_ids else b""
        return Encoded(ids, len(settled.decode()), num_ids)

    def encode_bytes(self, data: bytes) -> list[int]:
        """The same for bytes, which need not be UTF-8."""
        ids: list[int] = []
        node: Any
        append, root = ids.append, self._trie
        start, end = 0, len(data)
        while start < end:
            node, place, id = root, start, EOS
            while place < end:
                node = node.get(data[place])
                if node is None:
                    break
                place += 1
                if node.__class__ is int:  # a token that no other one begins with
                    id, start = node, place
                    break
                if _ID in node:
                    id, start = node[_ID], place
            append(id)
        return ids

    def content(self) -> str:
        """The tokens in the file's format."""
        return "".join(
            f"{id} {_literal(token)} {len(token)}\n" for id, token in sorted(self._by_id.items())
        )


def read_world(path: Path, ends: Ends = NO_ENDS) -> WorldCodec | BytesCodec:
    """Reads a vocabulary file; where each id is its byte it may have a line for id 0 too.

    Raises `TokenizerError` with the file and the line.
    """
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error}") from error
    try:
        tokens = dict(_lines(path, text))
        if tokens in (BYTE_TOKENS, {EOS: b"\0"} | BYTE_TOKENS):
            return BytesCodec()
        return WorldCodec(tokens.items(), ends)
    except TokenizerError as error:
        message = str(error)
        raise TokenizerError(
            message if message.startswith(str(path)) else f"{path}: {message}"
        ) from error


def _lines(path: Path, text: str) -> Iterator[tuple[int, bytes]]:
    seen: dict[int | bytes, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line:
            continue
        try:
            id, token = _parsed(line)
            for value in (id, token):
                if value in seen:
                    raise ValueError(f"{value!r} is that of line {seen[value]}, too")
                seen[value] = number
        except ValueError as error:
            raise TokenizerError(f"{path}, line {number}: {error}") from error
        yield id, token


def _parsed(line: str) -> tuple[int, bytes]:
    """The id and the bytes of a line. Raises ValueError."""
    id, _, rest = line.partition(" ")
    literal, _, length = rest.rpartition(" ")
    if not (id.isascii() and id.isdigit() and length.isascii() and length.isdigit()):
        raise ValueError("is not 'id literal length'")
    if len(id) > 8 or not (0 < int(id) <= MAX_ID or line in END_AS_BYTE):
        raise ValueError(f"the id must be in 1..{MAX_ID}, not {id:.80}")
    if len(length) > 8 or int(length) > MAX_TOKEN_BYTES or len(literal) > MAX_LITERAL:
        raise ValueError(f"the token is longer than {MAX_TOKEN_BYTES:,} bytes")
    token = _evaluated(literal)
    if str(len(token)) != length:
        raise ValueError(f"the token has {len(token)} bytes, not {length}")
    return int(id), token


def _evaluated(literal: str) -> bytes:
    """The bytes of a literal of a str or of bytes. Raises ValueError."""
    quote = literal.removeprefix("b")[:1]
    if quote not in ("'", '"') or len(literal) < 3 or literal[-1] != quote:
        raise ValueError("the token is not a quoted literal")
    body = literal.removeprefix("b")[1:-1]
    if quote in body.replace(f"\\{quote}", ""):
        raise ValueError("the token is not a quoted literal")
    if "\\" not in body and literal[0] != "b":
        return body.encode()
    try:
        value = ast.literal_eval(literal)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"the token is not a Python literal: {error}") from error
    return value.encode() if isinstance(value, str) else bytes(value)


def _literal(token: bytes) -> str:
    """As the published file has it: of a str where the bytes are UTF-8."""
    try:
        return repr(token.decode())
    except UnicodeDecodeError:
        return repr(token)


def _checked(tokens: Iterable[tuple[int, bytes]]) -> dict[int, bytes]:
    by_id: dict[int, bytes] = {}
    num_bytes = 0
    for id, token in tokens:
        if not 0 < id <= MAX_ID or id in by_id or not token:
            raise TokenizerError(f"id {id} of {token[:80]!r} is 0, too large, there twice or empty")
        num_bytes += len(token)
        if len(token) > MAX_TOKEN_BYTES or num_bytes > MAX_BYTES:
            raise TokenizerError(
                f"id {id}: a token has at most {MAX_TOKEN_BYTES:,} bytes, all have {MAX_BYTES:,}"
            )
        by_id[id] = token
    known = set(by_id.values())
    if len(known) < len(by_id):
        raise TokenizerError("two ids have the same bytes")
    missing = [byte for byte in range(256) if bytes([byte]) not in known]
    if missing:
        raise TokenizerError(f"there is no token for byte 0x{missing[0]:02X}")
    return by_id


def _trie(by_id: dict[int, bytes]) -> dict[int, Any]:
    """Dictionaries by the next byte; a token that no other one begins with is its id alone.

    Dictionaries, because they are what the interpreter looks up fastest.
    """
    root: dict[int, Any] = {}
    # The shorter ones first: only its own prefixes are found before a token.
    for id, token in sorted(by_id.items(), key=lambda item: len(item[1])):
        node = root
        for byte in token[:-1]:
            below = node.get(byte)
            if not isinstance(below, dict):
                below = node[byte] = {} if below is None else {_ID: below}
            node = below
        node[token[-1]] = id
    return root


# -------------------------------------------------------------------------------------------------
# RWKV's vocabulary in a ``tokenizer.json``, as two of its publishers write it.
#
# Both write each token in GPT-2's printable stand-ins for its bytes. A WordPiece without a prefix
# takes the longest token at each place, as the trie does, but its time grows with the cube of the
# text; `RwkvTrie` is a model that the usual library does not have. So both are read into the trie.
# Ids that are not used have tokens of two private characters, which have no bytes. A
# post-processor that puts id 0 in front of a text is what every session does anyway.


_UNUSED = re.compile("\ue000[0-9]+\ue001")
_MODELS = ("WordPiece", "RwkvTrie")
_BYTE_LEVEL = Kind(fallback=False)


def world_tokens(text: str) -> dict[int, bytes] | None:
    """The bytes of each id but 0; None for another tokenizer. Raises `TokenizerError`."""
    if not any(f'"{name}"' in text for name in _MODELS):  # spares the others a second reading
        return None
    values = parsed(text)
    if not _is_world(values):
        return None
    check_bounds(values)
    added = values.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise TokenizerError("added_tokens is not a list of objects")
    for token in added:
        if token.get("id") != 0:
            raise TokenizerError(f"added token {token.get('content')!r:.80} is not supported")
    names: dict[str, int] = values["model"]["vocab"]
    if not all(type(id) is int for id in names.values()):
        raise TokenizerError("model.vocab has an id that is not an integer")
    return {
        id: bytes_of(_BYTE_LEVEL, name)
        for name, id in names.items()
        if id != 0 and not _UNUSED.fullmatch(name)
    }


def _is_world(values: dict[str, Any]) -> bool:
    model = values["model"]
    if model.get("type") == "RwkvTrie":
        return isinstance(model.get("vocab"), dict)
    cut = values.get("pre_tokenizer")
    if not isinstance(cut, dict) or not isinstance(model.get("vocab"), dict):
        return False
    return (
        model.get("continuing_subword_prefix") == ""
        and values.get("normalizer") is None
        and cut.get("type") == "ByteLevel"
        and cut.get("use_regex") is False
        and cut.get("add_prefix_space") is False
    )


NUM_BYTES = 256
#: The bytes of each id but `EOS`.
BYTE_TOKENS = {id: bytes([id]) for id in range(NUM_BYTES) if id != EOS}


class BytesCodec:
    """See `model.tokenization.base.Codec`."""

    kind = "bytes"
    puts_space_in_front = False
    first_bytes: dict[int, bytes] = {}  # noqa: RUF012 - nothing is put in front of a text
    aliases: dict[str, int] = {}  # noqa: RUF012 - never changed
    eos_token_ids = (EOS,)
    special = {EOS: AddedToken(END_OF_TEXT, special=True)}  # noqa: RUF012 - never changed
    token_bytes = (b"", *BYTE_TOKENS.values())

    def encode(self, text: str) -> list[int]:
        """Its bytes."""
        return list(text.encode().replace(b"\0", b" "))

    encode_after_special = encode_continuation = encode_exact = encode

    def remembering(self) -> Self:
        """The same: there is nothing to remember."""
        return self

    def content(self) -> str:
        """In the format of RWKV's vocabularies, of which the end of text has no line."""
        return "".join(f"{id} {token!r} 1\n" for id, token in BYTE_TOKENS.items())
