"""The small corpus of the training tests, and a softmax model trained on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.config import ModelConfig
from model.tokenizer import Tokenizer, train_tokenizer
from model.training.data import Source
from model.training.loop import TrainConfig, train
from tests.model.training.conftest import one_thread, prose

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    documents = [prose(300, 3), prose(200, 5)]
    path.write_text("<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer(corpus: Path) -> Tokenizer:
    return train_tokenizer([corpus], 280)


@pytest.fixture(scope="session")
def trained(corpus: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a softmax model that has learnt something."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        intermediate_size=48,
        attention="softmax",
    )
    out = tmp_path_factory.mktemp("softmax")
    return train(training(corpus, out, num_steps=40, learning_rate=1e-2), config, tokenizer)


def training(corpus: Path, out: Path, **changes: object) -> TrainConfig:
    values: dict[str, object] = {
        "data": (Source(corpus),),
        "out": out,
        "valid": (corpus,),
        "num_steps": 10,
        "batch_size": 4,
        "window": 64,
        "warmup_steps": 2,
        "eval_every": 1000,
        "precision": "float32",
        "learning_rate": 3e-3,
        "device": "cpu",
    }
    return TrainConfig(**{**values, **changes})  # type: ignore[arg-type]
