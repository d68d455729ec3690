from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from model.config import ModelConfig
from model.evaluation import Mode, evaluate
from model.lm import LanguageModel
from model.tokenizer import Tokenizer
from model.training.data import DataError, documents

MODES: tuple[Mode, ...] = ("windows", "stream", "sliding")


def random_model(config: ModelConfig) -> LanguageModel:
    model = LanguageModel(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


@pytest.mark.parametrize("mode", MODES)
def test_uniform_model_costs_log2_of_the_vocabulary_per_token(
    mode: Mode, corpus: Path, tokenizer: Tokenizer, tiny: ModelConfig
) -> None:
    model = LanguageModel(tiny)
    torch.nn.init.zeros_(model.embedding.weight)
    for parameter in model.blocks.parameters():
        torch.nn.init.ones_(parameter)
    torch.nn.init.ones_(model.norm.weight)
    texts = list(documents(corpus))
    num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    num_bytes = sum(len(text.encode()) for text in texts)

    result = evaluate(model, tokenizer, corpus, mode, window=64)

    assert (result.num_tokens, result.num_bytes) == (num_tokens, num_bytes)
    expected = math.log2(tiny.vocab_size) * num_tokens / num_bytes
    assert result.bits_per_byte == pytest.approx(expected, rel=1e-5)
    assert result.perplexity == pytest.approx(tiny.vocab_size, rel=1e-4)


@pytest.mark.parametrize("attention", ["gated", "elu", "softmax"])
def test_stream_equals_one_window_over_the_whole_text(
    attention: str, tmp_path: Path, tokenizer: Tokenizer, tiny: ModelConfig
) -> None:
    path = tmp_path / "short.txt"
    path.write_text(
        "the old grey fox told a small bird what he saw over the hill", encoding="utf-8"
    )
    config = ModelConfig.from_dict({**tiny.to_dict(), "attention": attention})
    model = random_model(config)

    whole = evaluate(model, tokenizer, path, "windows", window=512)
    assert whole.num_tokens > 10
    for mode, window in (("stream", 5), ("sliding", 2 * whole.num_tokens)):
        part = evaluate(model, tokenizer, path, mode, window)  # type: ignore[arg-type]
        assert part.nats == pytest.approx(whole.nats, rel=1e-4)
    assert evaluate(model, tokenizer, path, "windows", 5).nats != pytest.approx(
        whole.nats, rel=1e-3
    )


def test_empty_documents_cost_nothing(
    corpus: Path, tmp_path: Path, tokenizer: Tokenizer, tiny: ModelConfig
) -> None:
    padded = tmp_path / "padded.txt"
    padded.write_text(
        "<|endoftext|>\n<|endoftext|>\n" + corpus.read_text(encoding="utf-8"), encoding="utf-8"
    )
    model = random_model(tiny)
    assert evaluate(model, tokenizer, padded) == evaluate(model, tokenizer, corpus)


def test_max_bytes_does_not_cut_a_character(
    tmp_path: Path, tokenizer: Tokenizer, tiny: ModelConfig
) -> None:
    path = tmp_path / "text"
    path.write_text("ab\u00e9\u00e9", encoding="utf-8")
    assert evaluate(random_model(tiny), tokenizer, path, max_bytes=5).num_bytes == 4


def test_text_without_content_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, tiny: ModelConfig
) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="no text"):
        evaluate(random_model(tiny), tokenizer, path)


def test_window_of_one_token_is_refused(
    corpus: Path, tokenizer: Tokenizer, tiny: ModelConfig
) -> None:
    with pytest.raises(DataError, match="window must be at least 2"):
        evaluate(random_model(tiny), tokenizer, corpus, "sliding", window=1)
