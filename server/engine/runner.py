"""Runs the model on rows of the state pool, with the same bits in any company.

A row's result must not depend on how many rows share its batch, so every
product has a shape for which the machine's matrix library treats each row
alike. Which those are is found out, not assumed: `row_tile` tries the model
itself at start. Chunks run one session at a time, always ``chunk_size`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model.lm import LanguageModel, ModelState
from server.engine.state_pool import StatePool

#: Rows of one `step` call; a larger batch runs in parts of this size.
MAX_ROWS = 64
_TILES = (1, 2, 4, 8, 16, 32, MAX_ROWS)


class Runner:
    """Prefill and decode for slots of ``pool``. Not thread-safe: the engine's thread owns it."""

    def __init__(self, model: LanguageModel, pool: StatePool) -> None:
        self._model = model
        self._pool = pool
        self._device = model.head_weight.device
        self.row_tile = row_tile(model)

    @torch.inference_mode()
    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Tensor:
        """Feeds one chunk to ``slot``; the logits after its last token, [vocabulary] float32."""
        slots = torch.tensor([slot], device=self._device)
        where = torch.tensor([position], device=self._device)
        ids = torch.tensor([tokens], device=self._device)
        x, state = self._model.hidden_chunk(ids, self._pool.gather(slots), where)
        self._pool.scatter(slots, state)
        return self._model.logits(x[0, -self.row_tile :])[-1].float()

    @torch.inference_mode()
    def decode(
        self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        """Feeds one token to each of B slots; the logits after it, [B, vocabulary] float32."""
        parts = []
        for start in range(0, len(slots), MAX_ROWS):
            part = slice(start, start + MAX_ROWS)
            parts.append(self._decode(slots[part], tokens[part], positions[part]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        rows = len(slots)
        padding = -rows % self.row_tile
        packed = torch.tensor(
            [[*row, *[row[0]] * padding] for row in (slots, tokens, positions)],
            device=self._device,
        )
        state = self._pool.gather(packed[0])
        logits, state = self._model.step(packed[1], state, packed[2])
        self._pool.scatter(packed[0, :rows], state)
        return logits[:rows].float()


@torch.inference_mode()
def row_tile(model: LanguageModel) -> int:
    """The smallest tile such that batches of whole tiles give every row the same bits.

    Compares a batch of `MAX_ROWS` rows, from random states, with each smaller
    multiple of the tile, at another place in the batch. Raises `RuntimeError`
    where no tile does, on which no promise of equal bits could be kept.
    """
    device = model.head_weight.device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (MAX_ROWS,), generator=generator).to(device)
    state: ModelState = tuple(
        {
            n: torch.randn(t.shape, generator=generator).to(device, t.dtype)
            if t.is_floating_point()
            else t
            for n, t in layer.items()
        }
        for layer in model.empty_state(MAX_ROWS)
    )
    wanted = _step(model, tokens, state, torch.arange(MAX_ROWS, device=device))
    for tile in _TILES:
        if all(
            torch.equal(_step(model, tokens, state, rows), wanted[rows])
            for size in range(tile, MAX_ROWS, tile)
            for rows in (torch.arange(MAX_ROWS - size, MAX_ROWS, device=device),)
        ):
            return tile
    raise RuntimeError("the matrix library gives a row other bits at other places in a batch")


def _step(model: LanguageModel, tokens: Tensor, state: ModelState, rows: Tensor) -> Tensor:
    part = tuple({n: t[rows] for n, t in layer.items()} for layer in state)
    logits, after = model.step(tokens[rows], part, torch.zeros_like(rows))
    flat = [t.reshape(len(rows), -1).float() for layer in after for t in layer.values()]
    return torch.cat([logits.float(), *flat], dim=1)
