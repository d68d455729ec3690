from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from model.convert.linearize import measure, recall_tasks
from model.convert.linearize.recall_tasks import recall_text
from model.convert.linearize.sequences import Sequences, Shard, Shares, common_ids, tokenized
from model.evaluation import documents
from tests.model.convert.linearize.tiny import tiny_tokenizer

BOOKS = np.full(500, 10, np.uint16)
STORIES = np.full(500, 20, np.uint16)
CHATS = Shard(np.arange(30, 230).astype(np.uint16), np.array([0, 50, 100, 150]))


def filler(rng: np.random.Generator, length: int) -> list[int]:
    return [200] * length


def made(shares: Shares, chats: list[Shard]) -> Sequences:
    return Sequences(tiny_tokenizer(), [BOOKS], STORIES, chats, shares, seed=3)


def test_draws_depend_on_step_and_row_alone() -> None:
    one, other = made(Shares(), [CHATS]), made(Shares(), [CHATS])
    drawn = [one.draw(step, row, 40).ids for step in range(6) for row in range(2)]
    again = [other.draw(step, row, 40).ids for step in range(6) for row in range(2)]
    assert all(map(torch.equal, drawn, again))
    assert len({tuple(ids.tolist()) for ids in drawn}) > 2


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        (Shares(chats=0.0, recall=0.0, stories=1.0), 20),
        (Shares(chats=0.0, recall=0.0, stories=0.0), 10),
    ],
)
def test_shares_choose_the_text(shares: Shares, wanted: int) -> None:
    for step in range(5):
        sequence = made(shares, []).draw(step, 0, 40)
        assert sequence.ids.tolist() == [wanted] * 41
        assert not sequence.marked.any()


def test_chats_begin_at_a_chat_and_without_any_their_share_is_books() -> None:
    shares = Shares(chats=1.0, recall=0.0, stories=0.0)
    for step in range(8):
        ids = made(shares, [CHATS]).draw(step, 0, 40).ids
        assert int(ids[0]) in {30, 80, 130, 180}
        assert ids.tolist() == list(range(int(ids[0]), int(ids[0]) + 41))
        assert made(shares, []).draw(step, 0, 40).ids.tolist() == [10] * 41


def test_answers_of_recall_texts_were_told_before_and_are_marked() -> None:
    tokenizer = tiny_tokenizer()
    values = {value for kind in recall_tasks.KINDS for value in kind.values}
    asked = 0
    for seed in range(12):
        text = recall_text(np.random.default_rng(seed), tokenizer, filler, 6000)
        assert len(text.ids) == len(text.marked) == 6000
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


def test_recall_texts_share_no_name_and_no_value_with_the_measure() -> None:
    assert not set(recall_tasks.NAMES) & set(measure.NAMES)
    values = {value for kind in recall_tasks.KINDS for value in kind.values}
    assert not values & set(measure.COLORS)


def test_measure_of_recall_tells_a_reader_from_a_guesser() -> None:
    tokenizer = tiny_tokenizer(tuple(f" {color}" for color in measure.COLORS))
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

    found = measure.recall(reader, head, tokenizer, text, 300, 16)
    assert (found.accuracy, found.count) == (1.0, 16)
    assert found.bits == pytest.approx(0.0, abs=1e-4)


def test_bits_per_byte_of_an_even_guess() -> None:
    tokenizer = tiny_tokenizer()
    head = torch.zeros(256, 4)
    ids = torch.randint(10, 200, (3, 100))
    sizes = torch.ones(tokenizer.vocab_size, dtype=torch.int64)
    bits = measure.bits_per_byte(lambda x: torch.zeros(1, x.shape[1], 4), head, ids, sizes)
    assert bits.all == pytest.approx(8.0)
    assert bits.by_position == pytest.approx({64: 8.0, 100: 8.0})


def test_special_ids_have_no_bytes_to_predict() -> None:
    tokenizer = tiny_tokenizer()
    sizes = measure.token_bytes(tokenizer)
    assert sizes[list(tokenizer.special_names)].sum() == 0
    assert sizes[tokenizer.encode("abc")].tolist() == [1, 1, 1]


def test_tokens_of_a_text_end_with_the_separator(tmp_path: Path) -> None:
    tokenizer, file = tiny_tokenizer(), tmp_path / "text.txt"
    file.write_text("One.\n<|endoftext|>\nTwo.\n", encoding="utf-8")
    ids = tokenized(file, tokenizer, tmp_path / "cache")
    separator = tokenizer.special_ids["<|endoftext|>"]
    one, two = (tokenizer.encode(text) for text in documents(file))
    assert ids.tolist() == [*one, separator, *two, separator]
    file.unlink()
    assert tokenized(file, tokenizer, tmp_path / "cache").tolist() == ids.tolist()


def test_common_ids_have_all_special_ids() -> None:
    ids = np.array([300, 300, 301, 302, 302, 302, 400], np.uint16)
    assert common_ids([ids], 500, 258).tolist() == [*range(256), 300, 302]
