"""A small corpus, a tokenizer learnt from it, and a model that trains in a second."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.config import ModelConfig
from model.tokenizer import Tokenizer, train_tokenizer
from model.training.data import Source
from model.training.loop import TrainConfig

WORDS = [
    *("the", "old", "grey", "fox", "ran", "over", "a", "hill", "and"),
    *("told", "every", "small", "bird", "what", "he", "saw", "there"),
]


def prose(num_words: int, stride: int) -> str:
    """Words in an order without a short period."""
    words = [WORDS[(i * i + stride * i) % len(WORDS)] for i in range(num_words)]
    return " ".join(words) + ".\n"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    documents = [prose(600, 3), prose(500, 5), prose(700, 7)]
    path.write_text("<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(corpus: Path) -> Tokenizer:
    return train_tokenizer([corpus], 280)


@pytest.fixture
def tiny(tokenizer: Tokenizer) -> ModelConfig:
    return ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=8,
        intermediate_size=24,
    )


@pytest.fixture
def corpus_config(corpus: Path, tmp_path: Path) -> TrainConfig:
    (tmp_path / "run").mkdir()
    return TrainConfig(
        (Source(corpus),),
        tmp_path / "run",
        num_steps=4,
        batch_size=3,
        window=32,
        warmup_steps=1,
        eval_every=4,
        precision="float32",
    )


def elsewhere(config: TrainConfig, name: str, **changes: Any) -> TrainConfig:
    """The run of ``config`` in another folder."""
    out = config.out.parent / name
    out.mkdir()
    return dataclasses.replace(config, out=out, **changes)


def tensors(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "progress" / "tensors.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, optimiser state and carried state, bit for bit."""
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
