"""What an evaluation reads and reports, on any backend: texts, and bits per byte."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model.architectures.config import Config
from model.architectures.hybrid import longest_text
from model.tokenizer import END_OF_TEXT

#: The context that a token may use; see `model.training.evaluate.evaluate`.
Mode = Literal["windows", "stream", "sliding"]
#: A part of a validation text; see `halved`.
Half = Literal["first", "second"]

#: A text of fewer documents consists of books, each of which is split in two.
MIN_DOCUMENTS = 10


class DataError(ValueError):
    """Texts that cannot be trained on or scored."""


def check_fits(config: Config, num_tokens: int) -> None:
    """Raises `DataError` where a piece of a text is longer than a model's bounded past."""
    longest = longest_text(config)
    if longest is not None and num_tokens > longest:
        raise DataError(
            f"{num_tokens} tokens are read at once, and the context is {longest}:"
            " give a larger --context, or --past slide"
        )


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


def documents(path: Path, half: Half | None = None) -> Iterator[str]:
    """The documents of a UTF-8 text file, split at lines that hold only ``<|endoftext|>``.

    With ``half``, those of that half of the file (`halved`).
    """
    return _documents(path) if half is None else iter(halved(list(_documents(path)), half))


def halved(texts: Sequence[str], half: Half) -> list[str]:
    """One half of ``texts``, to select a model on the first and report it on the second.

    Of `MIN_DOCUMENTS` and more, every other document, from the first or from the second
    on, so that both halves have texts of every source. Of fewer, a part of each: up to
    the start of the paragraph that is nearest to its middle, or from there on. A
    paragraph begins after an empty line.
    """
    if len(texts) >= MIN_DOCUMENTS:
        return list(texts[0 if half == "first" else 1 :: 2])
    cuts = [(text, _middle(text)) for text in texts]
    parts = (text[:cut] if half == "first" else text[cut:] for text, cut in cuts)
    return [part for part in parts if part]


def _middle(text: str) -> int:
    """Where the paragraph begins that is nearest to the middle; the end where there is one."""
    starts = (match.end() for match in re.finditer(r"\n\s*\n", text))
    return min(starts, key=lambda start: abs(2 * start - len(text)), default=len(text))


def _documents(path: Path) -> Iterator[str]:
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
