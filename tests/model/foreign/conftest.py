"""Folders as `transformers` writes them, with random weights.

Their vocabularies have 310 ids and the tokenizer 300: the rest is padding, as in most files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from model.checkpoint import Checkpoint, load_checkpoint
from model.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer

Save = Callable[..., Path]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture
def save(tmp_path: Path, tokenizer: Tokenizer) -> Save:
    """Writes a model of theirs, every weight random, into a folder with our tokenizer."""

    def write(model: PreTrainedModel, **options: object) -> Path:
        randomise(model)
        folder = tmp_path / "theirs"
        model.save_pretrained(folder, **options)
        tokenizer.save(folder / "tokenizer.json")
        return folder

    return write


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights of every kind set, biases and norms too, so that none can be mixed up unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
            if "norm" in name or "ln_" in name:
                parameter.add_(1.0)


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(290, (batch, length), generator=generator)


def assert_same_logits(folder: Path, theirs: PreTrainedModel, length: int) -> Checkpoint:
    """Loads the folder, which must compute what their own model does."""
    loaded, ids = load_checkpoint(folder), tokens(length)
    found, wanted = (
        logits[..., :300] for logits in (loaded.model.parallel(ids), theirs(ids).logits)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    return loaded
