"""What an evaluation reads and says, whatever runs the model: texts, and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model.tokenizer import END_OF_TEXT

#: What a token may look back on; see `model.training.evaluate.evaluate`.
Mode = Literal["windows", "stream", "sliding"]


class DataError(ValueError):
    """Texts that cannot be trained on or scored."""


@dataclass(frozen=True)
class Evaluation:
    """``perplexity`` is per token; ``nats`` is the sum over all scored tokens."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.num_bytes

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.num_tokens)


def documents(path: Path) -> Iterator[str]:
    """The documents of a UTF-8 text file, split at lines that hold only ``<|endoftext|>``."""
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip() == END_OF_TEXT:
                yield "".join(lines)
                lines = []
            else:
                lines.append(line)
    if "".join(lines).strip():
        yield "".join(lines)
