"""The native runtime's bits per byte are those of the torch evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model.evaluation import DataError, Evaluation, Mode, evaluate, evaluate_native
from model.native.runtime import Runtime
from tests.tiny import TEXT, tiny_checkpoint, tiny_tokenizer


def native(path: Path, attention: str = "gated", **options: Any) -> Evaluation:
    checkpoint = tiny_checkpoint(attention)
    runtime = Runtime(checkpoint.config, checkpoint.weights, "float32")
    return evaluate_native(runtime, checkpoint.tokenizer, path, **options)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(f"<|endoftext|>\n{TEXT}<|endoftext|>\n{TEXT[90:]}", encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["gated", "elu", "vq"])
@pytest.mark.parametrize("window", [2, 31, 512])
@pytest.mark.parametrize("mode", ["windows", "stream", "sliding"])
def test_float32_agrees_with_torch(attention: str, window: int, mode: Mode, text: Path) -> None:
    checkpoint = tiny_checkpoint(attention)
    theirs = evaluate(checkpoint.model, checkpoint.tokenizer, text, mode, window)
    ours = native(text, attention, mode=mode, window=window)
    assert (ours.num_tokens, ours.num_bytes) == (theirs.num_tokens, theirs.num_bytes)
    assert ours.bits_per_byte == pytest.approx(theirs.bits_per_byte, abs=1e-4)


def test_windows_start_from_the_empty_state(text: Path) -> None:
    short, long = native(text, window=8), native(text, window=512)
    assert short.num_tokens == long.num_tokens
    assert short.nats != pytest.approx(long.nats, rel=1e-4)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_windows_cover_every_token_once(extra: int, tmp_path: Path) -> None:
    ids = tiny_tokenizer().encode(TEXT)
    path = tmp_path / "cut.txt"
    path.write_text(tiny_tokenizer().decode(ids[: 64 + extra]), encoding="utf-8")
    assert native(path, window=32).num_tokens == 64 + extra


def test_first_bytes_of_each_document_hold_whole_characters(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("ab\u00e9\u00e9", encoding="utf-8")
    assert native(path, max_bytes=5).num_bytes == 4


def test_text_without_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("<|endoftext|>\n", encoding="utf-8")
    with pytest.raises(DataError, match="no text"):
        native(path)


def test_window_of_one_token_is_refused(text: Path) -> None:
    with pytest.raises(DataError, match="window must be at least 2"):
        native(text, window=1)
