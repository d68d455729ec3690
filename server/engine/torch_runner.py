"""Runs the model on torch, with the same bits in any company.

A row's result must not depend on how many rows share its batch. So steps and
logits run in batches of a few sizes, all rows of which get the same bits: see
`server.engine.invariance`, which finds them at start. A chunk has a call of its
own, and the same shapes always. Chunks and single steps agree up to rounding only,
so prompts are cut on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.architectures.network import ModelState, Network
from model.state_tensors import state_views
from server.engine.cpu_state_pool import CpuStatePool
from server.engine.invariance import batches, row_sizes
from server.engine.runner import HIDDEN_UNIT, NOTHING, Feed, Mask, RowOutput, TokenScore
from server.engine.sampler import Draw, allows_any, sample, scores_of
from server.engine.types import SamplingParams

#: Chunk sizes of prompts, each a multiple of the next.
GRID = (64, 16)

Forward = Callable[[Tensor, ModelState, Tensor], tuple[Tensor, ModelState]]

#: What slots [B] int64 will hold: the first B rows of a state.
Change = tuple[Tensor, ModelState]


class TorchRunner:
    """See `server.engine.runner.Runner`. The model is on the CPU, where the pool is.

    Only the first ``num_ids`` ids are drawn: a model's vocabulary may be padded
    beyond the tokenizer's, and those ids stand for nothing.
    """

    def __init__(
        self,
        model: Network,
        pool: CpuStatePool,
        num_ids: int,
        grid: tuple[int, ...] = GRID,
    ) -> None:
        self.grid = grid
        self._num_ids, self._num_slots = num_ids, pool.num_slots
        self._model = model
        self._views = state_views(pool.layout, torch.from_numpy(pool.blocks))
        self.row_sizes = row_sizes(model)

    def prepare(self, params: SamplingParams) -> SamplingParams:
        """The sampler takes them as they are."""
        return params

    @torch.inference_mode()
    def run(self, feeds: Sequence[Feed]) -> list[RowOutput]:
        """See `server.engine.runner.Runner.run`. Chunks of each size, then single tokens.

        The pool changes at the end, when nothing is left that may fail.
        """
        self._check(feeds)
        rows: dict[int, Tensor] = {}
        changes: list[Change] = []
        for size in sorted({len(feed.tokens) for feed in feeds}, reverse=True):
            index = [i for i, feed in enumerate(feeds) if len(feed.tokens) == size]
            part = [feeds[i] for i in index]
            logits = self._decode(part, changes) if size == 1 else self._prefill(part, changes)
            rows.update(zip(index, logits, strict=True))
        outputs = self._sample(feeds, rows)
        self._commit(changes)
        return outputs

    @torch.inference_mode()
    def score(self, feed: Feed, following: int, num_top: int = 0) -> list[TokenScore]:
        """See `server.engine.runner.Runner.score`."""
        self._check([feed])
        scored, changes = [*feed.tokens[1:], following], list[Change]()
        if not all(0 <= token < self._num_ids for token in scored):
            raise ValueError(f"token ids to score must be in 0..{self._num_ids - 1}")
        if len(feed.tokens) == 1:
            logits = self._decode([feed], changes)
        else:
            logits = self._logits(self._chunk(feed, changes))
        scores = scores_of(logits[:, : self._num_ids], scored, [num_top] * len(scored))
        self._commit(changes)
        return scores

    @torch.inference_mode()
    def embed(self, feed: Feed) -> npt.NDArray[np.float64]:
        """See `server.engine.runner.Runner.embed`."""
        self._check([feed])
        changes: list[Change] = []
        if len(feed.tokens) == 1:
            hidden = self._step(self._model.hidden_step, [feed], changes)
        else:
            hidden = self._chunk(feed, changes)
        units = (hidden.double() / HIDDEN_UNIT).round()
        total: npt.NDArray[np.float64] = (units.sum(dim=0) * HIDDEN_UNIT).numpy()
        self._commit(changes)
        return total

    def _check(self, feeds: Sequence[Feed]) -> None:
        """Raises `ValueError` for lengths, masks, and slots that torch would take for others."""
        if not all(len(feed.tokens) in (1, *self.grid) for feed in feeds):
            raise ValueError(f"a row must have 1 token or a chunk of {self.grid}")
        slots = [feed.slot for feed in feeds]
        num_slots = self._num_slots
        if len(set(slots)) < len(slots) or not all(0 <= slot < num_slots for slot in slots):
            raise ValueError(f"slots must differ and be in 0..{num_slots - 1}, not {slots}")
        if any(feed.num_draws != 1 for feed in feeds):
            raise ValueError("a row draws one token at most")
        masks = (_mask(feed) for feed in feeds if feed.draw is not None)
        if not all(mask is None or allows_any(mask, self._num_ids) for mask in masks):
            raise ValueError("a mask must be uint32, have bits for all ids, and allow one of them")

    def _sample(self, feeds: Sequence[Feed], rows: dict[int, Tensor]) -> list[RowOutput]:
        """What all rows draw, from the logits of those that may."""
        outputs: list[RowOutput] = [NOTHING] * len(feeds)
        index = [i for i, feed in enumerate(feeds) if feed.draw is not None]
        if not index:
            return outputs
        draws = [_draw(feeds[i]) for i in index]
        logits = torch.stack([rows[i] for i in index])[:, : self._num_ids]
        drawn = sample(logits, draws)
        for i, token in zip(index, drawn, strict=True):
            outputs[i] = (token,), (math.nan,), ((),)
        wanted = [row for row, i in enumerate(index) if feeds[i].wants_logprobs and drawn[row] >= 0]
        if wanted:
            num_tops = [draws[row].params.top_logprobs or 0 for row in wanted]
            scores = scores_of(logits[wanted], [drawn[row] for row in wanted], num_tops)
            for row, (logprob, top) in zip(wanted, scores, strict=True):
                outputs[index[row]] = (drawn[row],), (logprob,), (top,)
        return outputs

    def _prefill(self, feeds: list[Feed], changes: list[Change]) -> Tensor:
        """A chunk for each slot; the logits after its last token, [B, vocabulary] float32."""
        return self._logits(torch.stack([self._chunk(feed, changes)[-1] for feed in feeds]))

    def _decode(self, feeds: list[Feed], changes: list[Change]) -> Tensor:
        """One token for each slot; the logits after it, [B, vocabulary] float32."""
        return self._step(self._model.step, feeds, changes).float()

    def _chunk(self, feed: Feed, changes: list[Change]) -> Tensor:
        """The hidden states after each token of ``feed``, [T, D]; its new state to ``changes``."""
        slot, position = torch.tensor([feed.slot]), torch.tensor([feed.position])
        tokens = torch.tensor([list(feed.tokens)])
        hidden, state = self._model.hidden_chunk(tokens, self._gather(slot), position)
        changes.append((slot, state))
        return hidden[0]

    def _step(self, forward: Forward, feeds: list[Feed], changes: list[Change]) -> Tensor:
        """``forward`` over all slots, [B, ...]; their new states to ``changes``."""
        slots = torch.tensor([feed.slot for feed in feeds])
        positions = torch.tensor([feed.position for feed in feeds])
        tokens = torch.tensor([feed.tokens[0] for feed in feeds])
        outputs = []
        for rows, num in self._batches(len(feeds)):
            output, state = forward(tokens[rows], self._gather(slots[rows]), positions[rows])
            changes.append((slots[rows[:num]], state))
            outputs.append(output[:num])
        return torch.cat(outputs)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[B, D] to [B, vocabulary] float32."""
        parts = [self._model.logits(hidden[rows])[:num] for rows, num in self._batches(len(hidden))]
        return torch.cat(parts).float()

    def _batches(self, num_rows: int) -> Iterator[tuple[Tensor, int]]:
        """The rows of each batch, of which the first so many count; the rest repeats the last.

        What is taken by these indices is a copy, and so starts where products are fastest
        and always alike: the bits of some kernels depend on the address.
        """
        start = 0
        for size in batches(num_rows, self.row_sizes):
            rows = torch.arange(start, start + size).clamp_max(num_rows - 1)
            yield rows, min(size, num_rows - start)
            start += size

    def _gather(self, slots: Tensor) -> ModelState:
        """A copy of the states of ``slots`` [B] int64."""
        return tuple(
            {n: t.index_select(0, slots) for n, t in layer.items()} for layer in self._views
        )

    def _commit(self, changes: list[Change]) -> None:
        """Writes them into the pool."""
        for slots, state in changes:
            for views, layer in zip(self._views, state, strict=True):
                for name, tensor in layer.items():
                    views[name].index_copy_(0, slots, tensor[: len(slots)])


def _draw(feed: Feed) -> Draw:
    assert isinstance(feed.draw, SamplingParams), feed.draw
    return Draw(feed.draw, feed.position + len(feed.tokens), feed.recent or (), _mask(feed))


def _mask(feed: Feed) -> Mask | None:
    """That of the row's one draw."""
    return None if feed.allowed is None else feed.allowed[0]
