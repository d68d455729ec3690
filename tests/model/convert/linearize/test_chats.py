from __future__ import annotations

from pathlib import Path

import pytest

from model.convert.linearize import chats
from model.convert.linearize.chats import (
    CHAT_ML,
    MAX_CHAT,
    Writer,
    encode,
    write_chats,
    write_shard,
    writing_runtime,
)
from model.convert.linearize.sequences import read_shards
from model.convert.linearize.source import Source, read_source
from model.native.runtime import Runtime
from tests.model.convert.linearize.test_files import write_llama
from tests.model.convert.linearize.tiny import tiny_llama
from tests.requirements import needs_native

pytestmark = needs_native


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return read_source(write_llama(tmp_path_factory.mktemp("source") / "tiny.gguf", tiny_llama()))


@pytest.fixture(scope="module")
def runtime(source: Source) -> Runtime:
    return writing_runtime(source.checkpoint, 1)


def written(runtime: Runtime, source: Source, count: int, seed: int = 0) -> dict[int, list[int]]:
    writer = Writer(runtime, source.tokenizer, CHAT_ML, seed, first=5, count=count)
    while writer.step():
        pass
    assert writer.num_tokens == sum(map(len, writer.finished.values()))
    return writer.finished


def test_chats_are_turns_of_special_tokens_and_fit_their_bound(
    runtime: Runtime, source: Source
) -> None:
    tokenizer = source.tokenizer
    found = written(runtime, source, 6)
    assert sorted(found) == [5, 6, 7, 8, 9, 10]
    for chat in found.values():
        assert len(chat) <= MAX_CHAT
        assert chat[0] == tokenizer.special_ids["<|im_start|>"]
        assert "<|im" not in tokenizer.decode(chat)
        assert encode(tokenizer, CHAT_ML.assistant)[0] in chat[1:]


def test_chat_is_the_same_among_any_others_and_seeds_differ(
    runtime: Runtime, source: Source
) -> None:
    alone, among = written(runtime, source, 1), written(runtime, source, 4)
    assert alone[5] == among[5]
    assert written(runtime, source, 1, seed=1)[5] != alone[5]
    assert len({tuple(chat) for chat in among.values()}) == 4


def test_interrupted_writing_goes_on_with_the_same_tokens(
    runtime: Runtime, source: Source, tmp_path: Path
) -> None:
    def writers(number: int) -> Writer:
        return Writer(runtime, source.tokenizer, CHAT_ML, 0, first=3 * number, count=3)

    def write(folder: Path, steps: int) -> bool:
        left = iter(range(steps))
        return write_chats(folder, writers, 2500, lambda: next(left, None) is None, lambda n: None)

    assert write(tmp_path / "whole", 100_000)
    while not write(tmp_path / "parts", 150):
        assert len(list((tmp_path / "parts").glob("unfinished-*"))) == 1
    whole, parts = (read_shards(tmp_path / name) for name in ("whole", "parts"))
    assert len(whole) == len(parts) >= 1
    for one, other in zip(whole, parts, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.starts.tolist() == other.starts.tolist()
    assert chats.shard_tokens(tmp_path / "parts") >= 2500
    assert not list((tmp_path / "parts").glob("unfinished-*"))


def test_shard_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_shard(tmp_path / "00001.npz", [[5, 6, 7], [8, 9]])
    write_shard(tmp_path / "00000.npz", [[1, 100_000]])
    first, second = read_shards(tmp_path)
    assert first.ids.tolist() == [1, 100_000]
    assert second.ids.tolist() == [5, 6, 7, 8, 9]
    assert second.starts.tolist() == [0, 3]
