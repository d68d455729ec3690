"""What a model knows next to the source: bits per byte, and recall of a told fact by distance.

A model is here a function from ids [B, T] to the input of the head [B, T, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.convert.linearize.sequences import separator
from model.evaluation import DataError, Half, documents
from model.tokenizer import Tokenizer

Hidden = Callable[[Tensor], Tensor]
#: The least tokens of a half of a validation text.
MIN_TOKENS = 64
#: Rows of the head's logits at a time.
ROWS = 256
#: Positions at which a bin of `bits_by_position` ends.
BINS = (64, 256, 1024, 2048, 4096)

COLORS = ("red", "blue", "green", "yellow", "black", "white", "pink", "brown")
NAMES = ("Anna", "Tom", "Lucy", "Peter", "Mary", "Sam", "Emma", "Jack")


@dataclass(frozen=True)
class Bits:
    """Bits per byte of sequences from the empty state: of all tokens, and by position (`BINS`)."""

    all: float
    by_position: dict[int, float]


def half_ids(file: Path, tokenizer: Tokenizer, half: Half) -> Tensor:
    """Ids of the first half of a validation text, to choose by, or of the second, to report.

    Raises `DataError` where they are fewer than `MIN_TOKENS`.
    """
    ids: list[int] = []
    for text in documents(file, half):
        ids += [*tokenizer.encode(text), separator(tokenizer)]
    if len(ids) < MIN_TOKENS:
        raise DataError(f"{file}: its {half} half has {len(ids)} tokens, of at least {MIN_TOKENS}")
    return torch.tensor(ids)


def samples(ids: Tensor, count: int, num_tokens: int) -> Tensor:
    """``count`` pieces of ``num_tokens`` ids at even distances, or of all where it is fewer."""
    num_tokens = min(num_tokens, len(ids))
    starts = torch.linspace(0, len(ids) - num_tokens, count).long()
    return torch.stack([ids[start : start + num_tokens] for start in starts])


@torch.no_grad()
def bits_per_byte(hidden: Hidden, head: Tensor, ids: Tensor, num_bytes: Tensor) -> Bits:
    """Of ``ids`` [N, T], each row a text from the empty state; ``num_bytes`` are of each id."""
    nats = torch.stack([_nats(hidden(row[None])[0], head, row) for row in ids.to(head.device)])
    sizes = num_bytes[ids[:, 1:]].double().to(head.device)

    def bits(part: slice) -> float:
        total = nats[:, part].sum() / math.log(2)
        return float(total / sizes[:, part].sum().clamp_min(1.0))

    ends = [0, *(end for end in BINS if end < ids.shape[1]), ids.shape[1]]
    by_position = {b: bits(slice(a, b - 1)) for a, b in pairwise(ends)}
    return Bits(bits(slice(None)), by_position)


def _nats(hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    """-log p [T - 1] of each id but the first, float64."""
    parts = []
    for start in range(0, len(ids) - 1, ROWS):
        end = min(start + ROWS, len(ids) - 1)
        log_p = (hidden[start:end] @ head.t()).log_softmax(dim=-1)
        parts.append(-log_p.gather(1, ids[start + 1 : end + 1, None])[:, 0])
    return torch.cat(parts).double()


def token_bytes(tokenizer: Tokenizer) -> Tensor:
    """Bytes of each id; special ids have none."""
    sizes = [len(tokenizer.token_bytes(id)) for id in range(tokenizer.vocab_size)]
    for id in tokenizer.special_names:
        sizes[id] = 0
    return torch.tensor(sizes)


def tells_colors_apart(tokenizer: Tokenizer) -> bool:
    """Whether the first ids of the colours differ, which `recall` compares."""
    return len(set(color_ids(tokenizer))) == len(COLORS)


@dataclass(frozen=True)
class Question:
    """Asks for a favourite colour: ids of the text that tells it, and of the one that asks."""

    told: list[int]
    asked: list[int]
    color: int
    #: Where the other text between the two begins, as a part of all places.
    place: float

    def between(self, filler: list[int], distance: int) -> list[int]:
        """Ids of ``filler`` so that the question ends ``distance`` tokens behind the fact."""
        length = distance - len(self.asked)
        start = int(self.place * (len(filler) - length))
        return filler[start : start + length]


def questions(tokenizer: Tokenizer, count: int) -> Iterator[Question]:
    """``count`` of them, always the same; a guess is right one time in eight."""
    rng = np.random.default_rng(0)
    begin = tokenizer.encode("Here is a list of facts and a story.\n\n")
    for number in range(count):
        name, color = NAMES[number % len(NAMES)], int(rng.integers(len(COLORS)))
        fact = tokenizer.encode(f"{name}'s favorite color is {COLORS[color]}.\n\n")
        asked = tokenizer.encode(f"\n\n{name}'s favorite color is")
        yield Question([*begin, *fact], asked, color, rng.random())


def color_ids(tokenizer: Tokenizer) -> list[int]:
    """The first id of each colour, as it comes after a question."""
    return [tokenizer.encode(f" {color}")[0] for color in COLORS]


@dataclass(frozen=True)
class Recall:
    """Of a told colour: how often it is the first of the eight, and the mean log2 of its share."""

    accuracy: float
    bits: float
    count: int


@torch.no_grad()
def recall(
    hidden: Hidden, head: Tensor, tokenizer: Tokenizer, filler: Tensor, distance: int, count: int
) -> Recall:
    """Asks ``count`` times for a favourite colour that was told ``distance`` tokens before.

    ``filler`` are ids of other text.
    """
    colors = torch.tensor(color_ids(tokenizer), device=head.device)
    other = filler.tolist()
    right, bits = 0, 0.0
    for question in questions(tokenizer, count):
        text = [*question.told, *question.between(other, distance), *question.asked]
        last = hidden(torch.tensor([text], device=head.device))[0, -1]
        log_p = (head[colors] @ last).log_softmax(dim=-1)
        right += int(log_p.argmax() == question.color)
        bits += float(log_p[question.color]) / math.log(2)
    return Recall(right / count, bits / count, count)
