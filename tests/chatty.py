"""A tiny RWKV-7 model that answers: its weights make it emit a chosen text, token after token.

Each row of the head is the tokens before its own, and nothing else of the model says anything. Its
vocabulary has whole phrases, so that the prompt's last one decides how it goes on. Where several
phrases follow one, the seed decides between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from model.tokenization.world import FILE
from tests.rwkv7 import Shape, published, write_pth

THOUGHT = "Let me count to two."
ANSWER = "Here:\n\n- one\n\n- two\n\n```\na\n\nb\n```"

#: What comes after which phrase.
_PHRASES = (
    (" <think", f">\n{THOUGHT}\n</think>\n", ANSWER, "\n\nUser:", " so"),
    (" <think>\n</think", ">\n", ANSWER),
)

#: The model needs milliseconds for a token because of them: a matrix has their number squared.
NUM_LINES = 700


def lines_of_chance() -> list[tuple[str, ...]]:
    """Phrases of a model that writes lines, each one of two by chance, until it is stopped.

    It needs some milliseconds for one, so that there is time to stop it in the middle.
    """
    pairs = [(f"Line {line} holds.\n\n", f"Line {line} breaks.\n\n") for line in range(NUM_LINES)]
    rows = [(" <think>\n</think", ">\n", first) for first in pairs[0]]
    rows += [(" <think", first) for first in pairs[0]]
    return rows + [
        (before, after)
        for here, there in pairwise([*pairs, pairs[0]])
        for before in here
        for after in there
    ]


def write_chatty(folder: Path, phrases: Sequence[Sequence[str]] = _PHRASES) -> Path:
    """Writes the model and its vocabulary; returns the file of the weights."""
    words = [bytes([byte]) for byte in range(256)]
    words += sorted({phrase.encode() for row in phrases for phrase in row} - set(words))
    ids = {word: id for id, word in enumerate(words, start=1)}
    lines = [f"{id} {word!r} {len(word)}" for word, id in ids.items()]
    (folder / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    size = len(words) + 1
    shape = Shape(size, -(-size // 64) * 64, 1, 64, 64, (8, 8, 8, 8))
    weights = published(shape)
    for name in ("blocks.0.att.output.weight", "blocks.0.ffn.value.weight"):
        weights[name].zero_()
    for name in ("blocks.0.ln0", "ln_out"):
        weights[f"{name}.weight"].fill_(1.0)
        weights[f"{name}.bias"].zero_()
    weights["emb.weight"] = torch.eye(size, shape.width)
    head = torch.zeros(size, shape.width)
    for before, after in (pair for row in phrases for pair in pairwise(row)):
        head[ids[after.encode()], ids[before.encode()]] = 4.0
    weights["head.weight"] = head
    return write_pth(folder / "chatty.pth", weights)
