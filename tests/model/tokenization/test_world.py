"""RWKV's World tokenizer against the ``rwkv`` package's, and its file's mistakes by line."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.checkpoint import save_tokenizer
from model.tokenization.base import TokenizerError
from model.tokenization.world import FILE, WorldCodec, read_world
from model.tokenizer import Tokenizer
from server.engine.text import Detokenizer
from tests.model.attention.packages import folder, load_file
from tests.model.tokenization.files import TEXTS, load_folder
from tests.tiny import TEXT


def published() -> Path:
    return folder("rwkv") / FILE


@cache
def world() -> WorldCodec:
    return read_world(published())


@cache
def theirs() -> Any:
    """Their tokenizer, which takes seconds to make."""
    return load_file(folder("rwkv") / "rwkv_tokenizer.py").TRIE_TOKENIZER(str(published()))


@pytest.mark.slow
@given(TEXTS)
def test_ids_of_texts_are_those_of_the_package(text: str) -> None:
    assert world().encode(text) == theirs().encode(text)


@given(st.binary(max_size=60))
def test_ids_of_bytes_that_are_no_text_are_those_of_the_package(data: bytes) -> None:
    ids = world().encode_bytes(data)
    assert ids == theirs().encodeBytes(data)
    assert b"".join(world().token_bytes[id] for id in ids) == data


def test_tokens_in_any_order_are_read_as_by_the_package() -> None:
    """Whole tokens next to each other: the longest that fits often reaches across two."""
    choose, tokens = random.Random(0), [token for token in world().token_bytes if token]
    for _ in range(200):
        data = b"".join(choose.choices(tokens, k=20))
        assert world().encode_bytes(data) == theirs().encodeBytes(data)


def test_every_token_is_its_own_id() -> None:
    tokens = world().token_bytes
    assert len(tokens) == 65_530
    assert all(world().encode_bytes(tokens[id]) == [id] for id in range(1, len(tokens)))


def test_known_tokens_have_their_published_ids() -> None:
    assert [world().encode(text) for text in ("\n\n", "User", "\0")] == [[261], [24281], [1]]
    assert sum(not is_utf8(token) for token in world().token_bytes) == 486
    assert max(map(len, world().token_bytes)) == 128


def is_utf8(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_end_of_text_has_no_bytes_and_no_text_has_its_id() -> None:
    tokenizer = Tokenizer(world())
    assert (tokenizer.eos_token_id, tokenizer.token_bytes(0)) == (0, b"")
    assert tokenizer.special_names == {0: "<|endoftext|>"}
    assert tokenizer.special_ids == {"<|endoftext|>": 0, "<|rwkv_tokenizer_end_of_text|>": 0}
    assert 0 not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.encode("a<|endoftext|>", allow_special=True)[-1] == 0
    assert tokenizer.file_name == FILE
    assert tokenizer.kind == "RWKV vocabulary"


def test_content_is_the_published_file() -> None:
    published_text = published().read_bytes().replace(b"\r\n", b"\n")
    assert world().content().encode() == published_text


@given(TEXTS, st.integers(0, 40))
def test_stream_is_the_whole_text_wherever_it_is_cut(text: str, cut: int) -> None:
    tokenizer, detokenizer = Tokenizer(world()), Detokenizer(Tokenizer(world()))
    ids = tokenizer.encode(text)
    before = "".join(map(detokenizer.push, ids[:cut]))
    other = Detokenizer(tokenizer)
    other.restore(detokenizer.undecoded)
    assert before + "".join(map(other.push, ids[cut:])) + other.flush() == text


#: The bytes, and a few tokens of more.
SMALL = [(byte + 1, bytes([byte])) for byte in range(256)]


@given(
    st.sets(st.binary(min_size=2, max_size=5), max_size=30).filter(bool),
    st.binary(max_size=60),
)
def test_longest_token_that_fits_is_taken(tokens: set[bytes], data: bytes) -> None:
    codec = WorldCodec([*SMALL, *enumerate(sorted(tokens), 300)])
    known = {token for token in codec.token_bytes if token}
    place = 0
    for id in codec.encode_bytes(data):
        fitting = [token for token in known if data.startswith(token, place)]
        assert codec.token_bytes[id] == max(fitting, key=len)
        place += len(codec.token_bytes[id])
    assert place == len(data)


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    body = [f"{id} {token!r} 1" for id, token in SMALL]
    (path / FILE).write_bytes(end.join([*body, *lines, ""]).encode())
    return path / FILE


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_literals_of_every_kind_are_read(tmp_path: Path, end: str) -> None:
    lines = [
        "300 'it\\'s' 4",
        '301 "it\'s a" 6',
        "302 '漢' 3",
        "303 b'\\xe6\\xbc' 2",
        "304 ' ' * 1",
    ]
    codec = read_world(write(tmp_path, *lines[:4], "304 'a b' 3", "305 '\\u00e9x' 3", end=end))
    wanted = [b"it's", b"it's a", "漢".encode(), b"\xe6\xbc", b"a b", "éx".encode()]
    assert list(codec.token_bytes[300:306]) == wanted
    with pytest.raises(TokenizerError, match="line 257"):
        read_world(write(tmp_path, lines[4]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("300", "is not 'id literal length'"),
        ("x 'ab' 2", "is not 'id literal length'"),
        ("300 'ab' 3", "the token has 2 bytes, not 3"),
        ("300 'ab' two", "is not 'id literal length'"),
        ("0 'ab' 2", r"the id must be in 1\.\.1048576, not 0"),
        ("99999999999 'ab' 2", "the id must be in"),
        ("300 ab 2", "the token is not a quoted literal"),
        ("300 '' 0", "the token is not a quoted literal"),
        ("300 'a' 'b' 2", "the token is not a quoted literal"),
        ("300 __import__('os') 2", "the token is not a quoted literal"),
        ("300 f'{1}' 1", "the token is not a quoted literal"),
        ("300 '\\xg' 2", "the token is not a Python literal"),
        ("300 '\\ud800' 3", "surrogates not allowed"),
        ("1 'ab' 2", "1 is that of line 1, too"),
        ("300 b'\\x01' 1", r"b'\\x01' is that of line 2, too"),
    ],
)
def test_mistake_in_a_file_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, line)
    with pytest.raises(TokenizerError, match=rf"{FILE}, line 257: .*{message}"):
        read_world(path)


def test_files_without_all_bytes_or_of_other_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("1 'a' 1\n")
    with pytest.raises(TokenizerError, match=rf"{FILE}: there is no token for byte 0x00"):
        read_world(tmp_path / FILE)
    (tmp_path / FILE).write_bytes(b"1 '\xff' 1\n")
    with pytest.raises(TokenizerError, match=rf"{FILE} is not UTF-8"):
        read_world(tmp_path / FILE)


@pytest.mark.parametrize(
    "tokens", [[(0, b"a")], [(1, b"a")], [(300, b"")], [(300, b"a")], [(1 << 21, b"ab")]]
)
def test_pairs_that_are_no_vocabulary_are_refused(tokens: list[tuple[int, bytes]]) -> None:
    with pytest.raises(TokenizerError):
        WorldCodec([*SMALL, *tokens])


def test_folder_with_a_vocabulary_file_has_its_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, "261 '\\n\\n' 2\n300 '<end>' 5")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [0, 261, 300, 65_530]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "\n\n"}))
    tokenizer = load_folder(tmp_path)
    assert tokenizer.eos_token_ids == (0, 300), "an empty line is part of many texts"
    assert tokenizer.token_bytes(261) == b"\n\n"
    (tmp_path / "copy").mkdir()
    save_tokenizer(tmp_path / "copy", tokenizer)
    again = load_folder(tmp_path / "copy")
    assert (again.digest, again.eos_token_ids) == (tokenizer.digest, (0, 300))
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
