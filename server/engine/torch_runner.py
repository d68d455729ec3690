"""Runs the model on rows of the state pool, with the same bits in any company.

A row's result must not depend on how many rows share its batch, so every
product has a shape for which the machine's matrix library treats each row
alike. Which those are is found out at start, on the model itself, not assumed:
see `server.engine.invariance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model.lm import LanguageModel, ModelState
from server.engine.invariance import MAX_ROWS, chunk_batch, row_tile
from server.engine.state_pool import StatePool

Forward = Callable[[Tensor, ModelState, Tensor], tuple[Tensor, ModelState]]


class Runner:
    """Prefill and decode for slots of ``pool``. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self, model: LanguageModel, pool: StatePool, chunk_sizes: tuple[int, ...] = ()
    ) -> None:
        self._model = model
        self._pool = pool
        self.row_tile = row_tile(model)
        self.chunk_batch = {size: chunk_batch(model, size) for size in chunk_sizes}

    def prefill(
        self, slots: Sequence[int], positions: Sequence[int], chunks: Sequence[Sequence[int]]
    ) -> Tensor:
        """Feeds one chunk, all of one size, to each of B slots.

        Returns the logits after the last token of each, [B, vocabulary] float32.
        """
        batch = self.chunk_batch[len(chunks[0])]
        hidden = self._run(self._last_hidden, slots, positions, chunks, batch, tile=1)
        return self._logits(hidden)

    def decode(
        self, slots: Sequence[int], positions: Sequence[int], tokens: Sequence[int]
    ) -> Tensor:
        """Feeds one token to each of B slots; the logits after it, [B, vocabulary] float32."""
        logits = self._run(self._model.step, slots, positions, tokens, MAX_ROWS, self.row_tile)
        return logits.float()

    @torch.inference_mode()
    def _run(
        self,
        forward: Forward,
        slots: Sequence[int],
        positions: Sequence[int],
        inputs: Sequence[object],
        batch: int,
        tile: int,
    ) -> Tensor:
        """``forward`` over at most ``batch`` slots at a time, padded to whole tiles."""
        outputs = []
        for start in range(0, len(slots), batch):
            part = slice(start, start + batch)
            index, where, ids = (
                _padded(values[part], tile, self._model) for values in (slots, positions, inputs)
            )
            rows = len(slots[part])
            output, state = forward(ids, self._pool.gather(index), where)
            self._pool.scatter(index[:rows], state)
            outputs.append(output[:rows])
        return torch.cat(outputs)

    def _last_hidden(
        self, ids: Tensor, state: ModelState, where: Tensor
    ) -> tuple[Tensor, ModelState]:
        x, state = self._model.hidden_chunk(ids, state, where)
        return x[:, -1], state

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> Tensor:
        padding = hidden[:1].expand(-len(hidden) % self.row_tile, -1)
        return self._model.logits(torch.cat([hidden, padding]))[: len(hidden)].float()


def _padded(values: Sequence[object], tile: int, model: LanguageModel) -> Tensor:
    """The values as a tensor, the first one repeated up to a whole number of tiles."""
    padding = [values[0]] * (-len(values) % tile)
    return torch.tensor([*values, *padding], device=model.head_weight.device)
