"""Chats that the source writes itself: what the student will be asked to say.

Questions are made of templates and topics, or written by the source too, which is asked to
continue after the beginning of a user's message (Xu et al. 2024, "Magpie"). Rows of a batch are
independent: each takes one token per step, of its prompt or drawn, and begins another chat when its
own ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from model.convert.linearize.chat_format import ANSWER, END, SYSTEM, encode
from model.convert.linearize.network import Llama, angles, rotate
from model.convert.linearize.questions import follow_up, question
from model.tokenizer import Tokenizer

#: Tokens of a chat, and of one message in it.
MIN_CHAT, MAX_CHAT, MAX_ANSWER, MAX_QUESTION = 64, 1023, 320, 48
#: Turns of a chat: a number of them is drawn.
MAX_TURNS = 6
#: How often the source writes a question.
OWN_QUESTIONS = 0.35


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.8
    top_p: float = 0.95


@dataclass
class _Row:
    """One chat as it is written: ``feed`` are tokens of the prompt that are still to be read."""

    rng: np.random.Generator
    ids: list[int] = field(default_factory=list)
    feed: list[int] = field(default_factory=list)
    turns_left: int = 0
    asks: bool = False  # the source writes the user's message
    written: int = 0


class Writer:
    """Writes chats in ``num_rows`` rows."""

    def __init__(
        self, source: Llama, tokenizer: Tokenizer, num_rows: int, seed: int, sampling: Sampling
    ) -> None:
        self._source, self._tokenizer, self._sampling = source, tokenizer, sampling
        self._end = tokenizer.special_ids[END]
        self._rng = np.random.default_rng([seed, num_rows])
        self._device = source.norm.device
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._rows = [self._new_row() for _ in range(num_rows)]
        shape = source.shape
        size = (shape.num_layers, 2, num_rows, shape.num_kv_heads, MAX_CHAT, shape.head_dim)
        self._cache = torch.zeros(size, device=self._device)

    def step(self) -> list[list[int]]:
        """Each row takes one token; the chats that are over with it."""
        ids = torch.tensor([row.feed[0] for row in self._rows], device=self._device)
        positions = torch.tensor([len(row.ids) for row in self._rows], device=self._device)
        drawn = self._draw(self.logits(ids, positions)).tolist()
        finished = []
        for number, row in enumerate(self._rows):
            row.ids.append(row.feed.pop(0))
            if not row.feed:
                self._continue(row, drawn[number])
            if not row.feed or len(row.ids) + len(row.feed) > MAX_CHAT:
                finished.append(row.ids)
                self._rows[number] = self._new_row()
        return finished

    def unfinished(self) -> list[list[int]]:
        """The chats as far as they are written."""
        return [row.ids for row in self._rows if len(row.ids) >= MIN_CHAT]

    def _continue(self, row: _Row, drawn: int) -> None:
        """What comes after the tokens of a row: nothing, if its chat is over."""
        row.written += 1
        ended = drawn == self._end
        if not ended and row.written < (MAX_QUESTION if row.asks else MAX_ANSWER):
            row.feed = [drawn]
        elif row.asks:
            row.asks, row.written = False, 0
            row.feed = encode(self._tokenizer, f"{END}\n{ANSWER}")
        elif ended and row.turns_left:
            row.turns_left -= 1
            row.feed = encode(self._tokenizer, f"{END}\n") + self._question(row, first=False)
        elif ended:
            row.ids += encode(self._tokenizer, f"{END}\n")
            row.feed = []
        else:  # too long an answer ends a chat in its middle
            row.feed = []

    def _new_row(self) -> _Row:
        rng = np.random.default_rng(self._rng.integers(1 << 62))
        row = _Row(rng, turns_left=int(rng.integers(MAX_TURNS)))
        row.feed = encode(self._tokenizer, SYSTEM) + self._question(row, first=True)
        return row

    def _question(self, row: _Row, first: bool) -> list[int]:
        """The user's message up to where the source continues."""
        row.written = 0
        row.asks = bool(row.rng.random() < OWN_QUESTIONS)
        if row.asks:
            return encode(self._tokenizer, "<|im_start|>user\n")
        text = question(row.rng) if first else follow_up(row.rng)
        return encode(self._tokenizer, f"<|im_start|>user\n{text}{END}\n{ANSWER}")

    @torch.no_grad()
    def logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """One token of each row [R], at its position [R]; the logits [R, vocabulary]."""
        source, shape = self._source, self._source.shape
        x = F.embedding(ids, source.embedding)
        length = int(positions.max()) + 1
        mask = (torch.arange(length, device=ids.device) <= positions.unsqueeze(1))[:, None, None]
        cos, sin = (t.unsqueeze(1) for t in angles(positions, shape))
        rows, kv = torch.arange(len(ids), device=ids.device), shape.num_kv_heads
        for index in range(shape.num_layers):
            layer = source.layer(index)
            qkv = F.linear(source.attention_input(index, x), layer.qkv)
            q, k, v = qkv.unflatten(1, (-1, shape.head_dim)).split([shape.num_heads, kv, kv], dim=1)
            keys, values = self._cache[index]
            keys[rows, :, positions] = rotate(k, cos, sin)
            values[rows, :, positions] = v
            grouped = rotate(q, cos, sin).unflatten(1, (kv, shape.group))
            o = F.scaled_dot_product_attention(
                grouped, keys[:, :, :length], values[:, :, :length], attn_mask=mask
            )
            x = x + F.linear(o.flatten(1), layer.out)
            x = source.after_mlp(index, x)
        return F.linear(source.final_norm(x), source.embedding)

    def _draw(self, logits: Tensor) -> Tensor:
        """An id of each row, of the most likely ones that have ``top_p`` together."""
        p, ids = (logits / self._sampling.temperature).softmax(dim=-1).topk(256)
        before = p.cumsum(dim=-1) - p
        p = p.masked_fill(before >= self._sampling.top_p, 0.0)
        place = torch.multinomial(p, 1, generator=self._generator)
        return ids.gather(1, place)[:, 0]


def write_shard(path: Path, chats: list[list[int]]) -> None:
    """Replaces the shard ``path``."""
    lengths = [len(chat) for chat in chats]
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(
            file, ids=np.concatenate([np.array(chat, np.uint16) for chat in chats]), starts=starts
        )
    partial.replace(path)
