from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from model.convert.linearize import report, sequences
from model.convert.linearize.chats import CHAT_ML, ChatFormat
from model.convert.linearize.sequences import (
    Sequences,
    Shard,
    Shares,
    Text,
    common_ids,
    recall_text,
    tokenized,
)
from model.evaluation import documents
from tests.model.convert.linearize.tiny import tiny_tokenizer

BOOKS = Text(np.full(500, 10, np.uint16), 3.0)
STORIES = Text(np.full(500, 20, np.uint16))
CHATS = Shard(np.arange(30, 230).astype(np.uint16), np.array([0, 50, 100, 150]))


def filler(rng: np.random.Generator, length: int) -> list[int]:
    return [200] * length


def made(shares: Shares, chats: list[Shard]) -> Sequences:
    return Sequences(tiny_tokenizer(), [BOOKS, STORIES], chats, shares, seed=3, chat=CHAT_ML)


def test_draws_depend_on_step_and_row_alone() -> None:
    one, other = made(Shares(), [CHATS]), made(Shares(), [CHATS])
    drawn = [one.draw(step, row, 40).ids for step in range(6) for row in range(2)]
    again = [other.draw(step, row, 40).ids for step in range(6) for row in range(2)]
    assert all(map(torch.equal, drawn, again))
    assert len({tuple(ids.tolist()) for ids in drawn}) > 2


def test_weights_of_texts_say_how_often_each_is_drawn() -> None:
    drawn = [made(Shares(0.0, 0.0), []).draw(step, 0, 40) for step in range(200)]
    firsts = [int(sequence.ids[0]) for sequence in drawn]
    assert all(
        sequence.ids.tolist() == [first] * 41 for sequence, first in zip(drawn, firsts, strict=True)
    )
    assert not any(sequence.marked.any() for sequence in drawn)
    assert 130 < firsts.count(10) < 170
    assert firsts.count(10) + firsts.count(20) == 200


def test_text_shorter_than_a_sequence_is_repeated() -> None:
    short = Text(np.arange(5, 12).astype(np.uint16))
    made = Sequences(tiny_tokenizer(), [short], [], Shares(0.0, 0.0), seed=0, chat=None)
    assert made.draw(0, 0, 15).ids.tolist() == [*range(5, 12), *range(5, 12), 5, 6]


def test_chats_begin_at_a_chat_and_without_any_their_share_is_texts() -> None:
    shares = Shares(chats=1.0, recall=0.0)
    for step in range(8):
        ids = made(shares, [CHATS]).draw(step, 0, 40).ids
        assert int(ids[0]) in {30, 80, 130, 180}
        assert ids.tolist() == list(range(int(ids[0]), int(ids[0]) + 41))
        assert set(made(shares, []).draw(step, 0, 40).ids.tolist()) <= {10, 20}


@pytest.mark.parametrize("chat", [CHAT_ML, None])
def test_answers_of_recall_texts_were_told_before_and_are_marked(chat: ChatFormat | None) -> None:
    tokenizer = tiny_tokenizer()
    values = {value for kind in sequences.KINDS for value in kind.values}
    asked, starts = 0, set()
    for seed in range(12):
        text = recall_text(np.random.default_rng(seed), tokenizer, filler, 6000, chat)
        assert len(text.ids) == len(text.marked) == 6000
        starts.add(text.ids[0])
        edges = np.flatnonzero(np.diff([0, *text.marked, 0]))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if end == 6000:
                continue
            asked += 1
            value = tokenizer.decode(text.ids[start:end])
            assert value[0] == " "
            assert value[1:] in values
            assert value in tokenizer.decode(text.ids[:start])
    assert asked > 50
    assert (tokenizer.special_ids["<|im_start|>"] in starts) == (chat is not None)


def test_recall_texts_share_no_name_and_no_value_with_the_measure() -> None:
    assert not set(sequences.NAMES) & set(report.NAMES)
    values = {value for kind in sequences.KINDS for value in kind.values}
    assert not values & set(report.COLORS)


def test_measure_of_recall_tells_a_reader_from_a_guesser() -> None:
    tokenizer = tiny_tokenizer(tuple(f" {color}" for color in report.COLORS))
    head = torch.eye(tokenizer.vocab_size)
    text = torch.tensor(tokenizer.encode("a story goes on and on. " * 40))

    def reader(ids: torch.Tensor) -> torch.Tensor:
        told = tokenizer.decode(ids[0].tolist())
        color = told.split("favorite color is ")[1].split(".")[0]
        assert told.endswith("favorite color is")
        assert told.count(color) == 1
        hidden = torch.zeros(1, ids.shape[1], tokenizer.vocab_size)
        hidden[0, -1, tokenizer.encode(f" {color}")[0]] = 50.0
        return hidden

    found = report.recall(reader, head, tokenizer, text, 300, 16)
    assert (found.accuracy, found.count) == (1.0, 16)
    assert found.bits == pytest.approx(0.0, abs=1e-4)


def test_bits_per_byte_of_an_even_guess() -> None:
    tokenizer = tiny_tokenizer()
    head = torch.zeros(256, 4)
    ids = torch.randint(10, 200, (3, 100))
    sizes = torch.ones(tokenizer.vocab_size, dtype=torch.int64)
    bits = report.bits_per_byte(lambda x: torch.zeros(1, x.shape[1], 4), head, ids, sizes)
    assert bits.all == pytest.approx(8.0)
    assert bits.by_position == pytest.approx({64: 8.0, 100: 8.0})


def test_special_ids_have_no_bytes_to_predict() -> None:
    tokenizer = tiny_tokenizer()
    sizes = report.token_bytes(tokenizer)
    assert sizes[list(tokenizer.special_names)].sum() == 0
    assert sizes[tokenizer.encode("abc")].tolist() == [1, 1, 1]


def test_tokens_of_a_text_end_with_the_separator(tmp_path: Path) -> None:
    tokenizer, file = tiny_tokenizer(), tmp_path / "text.txt"
    file.write_text("One.\n<|endoftext|>\nTwo.\n", encoding="utf-8")
    ids = tokenized(file, tokenizer, tmp_path / "cache")
    separator = tokenizer.special_ids["<|endoftext|>"]
    one, two = (tokenizer.encode(text) for text in documents(file))
    assert ids.tolist() == [*one, separator, *two, separator]
    assert tokenized(file, tokenizer, tmp_path / "cache").tolist() == ids.tolist()
    (kept,) = (tmp_path / "cache").iterdir()
    file.write_text("Other.\n", encoding="utf-8")
    assert tokenized(file, tokenizer, tmp_path / "cache").tolist() != ids.tolist()
    assert kept.is_file()


def test_common_ids_have_all_bytes_and_special_ids() -> None:
    tokenizer = tiny_tokenizer(("one", "two", "three"))
    first = tokenizer.vocab_size - 3
    ids = np.array([first, first + 1, first + 1], np.uint16)
    always = [id for id in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(id)) <= 1]
    assert common_ids([ids], tokenizer, len(always) + 1).tolist() == [*always, first + 1]


def test_ids_of_a_large_vocabulary_have_32_bits(tmp_path: Path) -> None:
    words = tuple(f"word{number} " for number in range(1 << 16))
    tokenizer, file = tiny_tokenizer(words), tmp_path / "text.txt"
    file.write_text("word65535 word1 ", encoding="utf-8")
    ids = tokenized(file, tokenizer, tmp_path / "cache")
    assert ids.tolist()[:2] == tokenizer.encode("word65535 word1 ")
    assert ids[0] > 1 << 16
