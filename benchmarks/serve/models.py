"""A checkpoint of a measured size that can be served: random weights and a tokenizer of its own."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.decode.models import checkpoint
from benchmarks.decode.shapes import Size
from model.tokenizer import train_tokenizer

SYLLABLES = tuple(onset + vowel for onset in "bcdfghjklmnprstvwz" for vowel in "aeiou")
WORDS_PER_ID = 4
WORDS_PER_LINE = 12


def text_checkpoint(folder: Path, size: Size, attention: str) -> Path:
    """A `checkpoint` with a ``tokenizer.json`` of exactly ``size.vocab_size`` ids."""
    path = checkpoint(folder, size, attention)
    tokenizer = path / "tokenizer.json"
    if not tokenizer.exists():
        text = folder / "words.txt"
        text.write_text(invented_text(size.vocab_size), encoding="utf-8")
        trained = train_tokenizer([text], size.vocab_size)
        assert trained.vocab_size == size.vocab_size, trained.vocab_size
        trained.save(tokenizer)
    return path


def invented_text(vocab_size: int) -> str:
    """Lines of invented words, common and rare, enough of them to learn ``vocab_size`` ids from."""
    draw, num_words = random.Random(0), WORDS_PER_ID * vocab_size
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(num_words)]
    weights = [1 / rank for rank in range(1, num_words + 1)]
    return "\n".join(
        " ".join(draw.choices(words, weights, k=WORDS_PER_LINE)) for _ in range(vocab_size)
    )
