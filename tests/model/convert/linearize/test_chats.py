from __future__ import annotations

from pathlib import Path

import torch

from model.convert.linearize.chats import MAX_CHAT, Sampling, Writer, write_shard
from model.convert.linearize.sequences import read_shards
from tests.model.convert.linearize.tiny import tiny_ids, tiny_llama, tiny_tokenizer


def test_logits_of_rows_at_different_positions_are_those_of_whole_texts() -> None:
    source, rows = tiny_llama(), tiny_ids(12, rows=3)
    writer = Writer(source, tiny_tokenizer(), 3, 0, Sampling())
    wanted = source.hidden(rows) @ source.embedding.t()
    # The second row starts three tokens later, the third begins again in the middle.
    for step in range(12):
        positions = torch.tensor([step, max(0, step - 3), step % 7])
        ids = rows[torch.arange(3), positions]
        found = writer.logits(ids, positions)
        torch.testing.assert_close(found, wanted[torch.arange(3), positions], rtol=1e-4, atol=1e-4)


def test_chats_begin_with_the_system_message_and_fit_their_bound() -> None:
    tokenizer = tiny_tokenizer()
    writer = Writer(tiny_llama(), tokenizer, 4, 0, Sampling())
    chats = [chat for _ in range(1200) for chat in writer.step()]
    assert len(chats) >= 2
    for chat in [*chats, *writer.unfinished()]:
        assert len(chat) <= MAX_CHAT
        start = tokenizer.special_ids["<|im_start|>"]
        system = tokenizer.encode("system\nYou are a helpful AI assistant named SmolLM")
        assert chat[: len(system) + 1] == [start, *system]
        assert chat.count(start) >= 2
        assert "<|im" not in tokenizer.decode(chat)


def test_same_seed_writes_the_same_chats() -> None:
    def written(seed: int) -> list[list[int]]:
        writer = Writer(tiny_llama(), tiny_tokenizer(), 2, seed, Sampling())
        for _ in range(150):
            writer.step()
        return writer.unfinished()

    assert written(1) == written(1) != written(2)


def test_shard_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_shard(tmp_path / "00001.npz", [[5, 6, 7], [8, 9]])
    write_shard(tmp_path / "00000.npz", [[1, 2]])
    first, second = read_shards(tmp_path)
    assert first.ids.tolist() == [1, 2]
    assert second.ids.tolist() == [5, 6, 7, 8, 9]
    assert second.starts.tolist() == [0, 3]
