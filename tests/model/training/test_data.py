from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from model.tokenizer import Tokenizer
from model.training.data import DataError, Shuffled, Source, StreamBatches, documents, tokenize_file

END = 0


def corpus_of(*lengths: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Documents whose tokens are all different, each with `END` after it."""
    ids, first = [], 1
    for length in lengths:
        ids += [*range(first, first + length - 1), END]
        first += length - 1
    return np.array(ids, dtype=np.uint16)


def stream(num_tokens: int = 1003, batch_size: int = 4, seed: int = 7) -> StreamBatches:
    tokens = np.arange(1, num_tokens + 1, dtype=np.uint16)
    return StreamBatches([tokens], END, batch_size, window=16, stream_windows=8, seed=seed)


def test_documents_are_split_at_separator_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a <|endoftext|> b\n<|endoftext|>\nc\n<|endoftext|>\n", encoding="utf-8")
    assert list(documents(path)) == ["a <|endoftext|> b\n", "c\n"]


def test_token_file_holds_every_document_and_its_end(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokens = tokenize_file(corpus, tokenizer, tmp_path / "cache")
    expected: list[int] = []
    for document in documents(corpus):
        expected += [*tokenizer.encode(document), tokenizer.eos_token_id]
    assert tokens.tolist() == expected


def test_second_start_reuses_the_token_file(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenize_file(corpus, tokenizer, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    written = path.stat().st_mtime_ns
    tokenize_file(corpus, tokenizer, tmp_path / "cache")
    assert [p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()] == [written]


def test_changed_text_gets_another_token_file(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    before = tokenize_file(corpus, tokenizer, tmp_path / "cache").tolist()
    corpus.write_text(corpus.read_text(encoding="utf-8") + "the end\n", encoding="utf-8")
    after = tokenize_file(corpus, tokenizer, tmp_path / "cache").tolist()
    assert len(after) > len(before)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("a.txt", Source(Path("a.txt"), 1.0)),
        ("a.txt:2.5", Source(Path("a.txt"), 2.5)),
        ("c:/a.txt", Source(Path("c:/a.txt"), 1.0)),
    ],
)
def test_source_is_a_file_and_perhaps_a_weight(text: str, source: Source) -> None:
    assert Source.parse(text) == source


@pytest.mark.parametrize("text", ["a.txt:0", "a.txt:-1", "a.txt:inf", "a.txt:nan"])
def test_weight_must_be_a_number_above_zero(text: str) -> None:
    with pytest.raises(DataError, match=r"weight of a\.txt"):
        Source.parse(text)


def test_row_reads_on_until_its_next_reset() -> None:
    batches = stream()
    steps = [(batches.batch(step), batches.resets(step)) for step in range(40)]
    for row in range(4):
        for ((_, targets), _), ((inputs, _), resets) in itertools.pairwise(steps):
            follows = inputs[row, 0] == targets[row, -1]
            assert bool(follows) or bool(resets[row])
    for (inputs, targets), _ in steps:
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_rows_start_pieces_at_different_steps_and_every_eight_windows() -> None:
    batches = stream()
    resets = torch.stack([batches.resets(step) for step in range(33)])
    assert resets[0].all()
    assert [resets[1:, row].nonzero().flatten().tolist() for row in range(4)] == [
        [first - 1, first + 7, first + 15, first + 23] for first in (2, 4, 6, 8)
    ]


def test_epoch_reads_every_piece_once_in_another_order() -> None:
    shuffled = Shuffled(np.arange(1, 801, dtype=np.uint16), END, length=80, seed=3)
    epochs = [
        [shuffled.read(epoch * 10 + place, 0, 80).tolist() for place in range(10)]
        for epoch in range(2)
    ]
    for epoch in epochs:
        assert sorted(token for piece in epoch for token in piece) == list(range(1, 801))
    assert epochs[0] != epochs[1]
    first = [piece[0] for piece in epochs[0]]
    assert first != sorted(first)


def test_documents_stay_whole_and_change_places() -> None:
    tokens = corpus_of(*[20] * 50)
    shuffled = Shuffled(tokens, END, length=len(tokens), seed=3)
    orders = []
    for epoch in range(2):
        read = shuffled.read(epoch, 0, len(tokens)).tolist()
        start = read.index(END) + 1
        turned = read[start:] + read[:start]
        pieces = [turned[i : i + 20] for i in range(0, 1000, 20)]
        assert {piece[0] for piece in pieces} == {1 + 19 * i for i in range(50)}
        assert all(piece == [*range(piece[0], piece[0] + 19), END] for piece in pieces)
        orders.append([piece[0] for piece in pieces])
    assert orders[0] != orders[1]


def test_batches_are_a_function_of_seed_and_step() -> None:
    backwards = stream()
    assert torch.equal(stream().batch(50)[0], backwards.batch(50)[0])
    assert torch.equal(stream().batch(11)[0], backwards.batch(11)[0])
    assert not torch.equal(stream(seed=8).batch(11)[0], backwards.batch(11)[0])


def test_sources_are_read_by_size_and_weight_and_then_by_final_weight() -> None:
    small = np.full(1000, 1, dtype=np.uint16)
    large = np.full(3000, 2, dtype=np.uint16)
    batches = StreamBatches(
        [small, large],
        END,
        4,
        16,
        2,
        0,
        weights=(3.0, 1.0),
        final_weights=(0.0, 1.0),
        final_from=200,
    )
    early = Counter(int(row[0]) for step in range(200) for row in batches.batch(step)[0])
    assert early[1] == pytest.approx(early[2], rel=0.05)
    late = Counter(int(row[0]) for step in range(204, 300) for row in batches.batch(step)[0])
    assert late[1] == 0


def test_pieces_before_the_final_part_do_not_depend_on_its_start() -> None:
    def run(final_from: int) -> StreamBatches:
        tokens = [np.arange(1, 900, dtype=np.uint16), np.arange(1, 700, dtype=np.uint16)]
        return StreamBatches(
            tokens, END, 4, 16, 8, 0, final_weights=(0.0, 1.0), final_from=final_from
        )

    for step in range(100):
        assert torch.equal(run(100).batch(step)[0], run(400).batch(step)[0])


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(DataError, match="16 tokens are too few"):
        stream(num_tokens=16)
