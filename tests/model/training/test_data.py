from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from model.tokenizer import Tokenizer
from model.training.data import DataError, StreamBatches, documents, tokenize_files


def stream(num_tokens: int = 1003, batch_size: int = 4, window: int = 16) -> StreamBatches:
    return StreamBatches(np.arange(num_tokens, dtype=np.uint16), batch_size, window, seed=7)


def test_documents_are_split_at_separator_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a <|endoftext|> b\n<|endoftext|>\nc\n<|endoftext|>\n", encoding="utf-8")
    assert list(documents(path)) == ["a <|endoftext|> b\n", "c\n"]


def test_token_file_holds_every_document_and_its_end(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokens = tokenize_files([corpus], tokenizer, tmp_path / "cache")
    expected: list[int] = []
    for document in documents(corpus):
        expected += [*tokenizer.encode(document), tokenizer.eos_token_id]
    assert tokens.tolist() == expected


def test_second_start_reuses_the_token_file(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenize_files([corpus], tokenizer, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    written = path.stat().st_mtime_ns
    tokenize_files([corpus], tokenizer, tmp_path / "cache")
    assert [p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()] == [written]


def test_changed_text_gets_another_token_file(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    before = tokenize_files([corpus], tokenizer, tmp_path / "cache").tolist()
    corpus.write_text(corpus.read_text(encoding="utf-8") + "the end\n", encoding="utf-8")
    after = tokenize_files([corpus], tokenizer, tmp_path / "cache").tolist()
    assert len(after) > len(before)


def test_rows_read_on_where_they_stopped() -> None:
    batches = stream()
    inputs, targets = zip(*(batches.batch(step) for step in range(40)), strict=True)
    for row in range(4):
        read = torch.cat([x[row] for x in inputs])
        wanted = torch.cat([y[row] for y in targets])
        assert torch.equal(read[1:], wanted[:-1])
        assert torch.equal(wanted, (read + 1) % 1003)


def test_one_epoch_reads_every_token() -> None:
    batches = stream()
    seen = {
        int(token)
        for step in range(int(batches.steps_per_epoch) + 1)
        for token in batches.batch(step)[0].flatten()
    }
    assert seen == set(range(1003))


def test_batches_are_a_function_of_seed_and_step() -> None:
    assert torch.equal(stream().batch(11)[0], stream().batch(11)[0])
    other = StreamBatches(np.arange(1003, dtype=np.uint16), 4, 16, seed=8)
    assert not torch.equal(other.batch(11)[0], stream().batch(11)[0])


def test_resets_come_as_often_as_asked() -> None:
    batches = stream(batch_size=8)
    draws = torch.stack([batches.resets(step, 0.1) for step in range(1, 1001)])
    assert 0.08 < draws.double().mean() < 0.12
    assert torch.equal(draws[4], batches.resets(5, 0.1))
    assert batches.resets(0, 0.0).all()
    assert not batches.resets(1, 0.0).any()


def test_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(DataError, match="16 tokens are too few"):
        stream(num_tokens=16)
