"""Finds batch shapes for which the matrix library gives each row the same bits.

A library picks its kernel by the shape of a product, and kernels add in
different orders. So a row's bits may change with the number of rows beside it:
MKL in float32, for one, treats one and two rows differently from four and more.
The functions here compare the model's own outputs and states over batch sizes
and places in the batch, and return what is safe to use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model.lm import LanguageModel, ModelState

#: Rows of one `step`; a larger batch runs in parts of this size.
MAX_ROWS = 64
#: Sequences of one `chunk`.
MAX_CHUNKS = 8

#: What the texts of a trial have before them: more than a window of the usual length.
PAST_TOKENS = 100

_TILES = (1, 2, 4, 8, 16, 32, MAX_ROWS)
#: Batches that are tried: all small ones, where kernels differ, and some on and off powers of two.
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 20, 24, 31, 32, 33, 40, 48, 56, 60, 63)
_BATCHES = (MAX_CHUNKS, 4, 2)

Forward = Callable[[Tensor, ModelState, Tensor], tuple[Tensor, ModelState]]


@torch.inference_mode()
def row_tile(model: LanguageModel) -> int:
    """The smallest tile such that `step` on whole tiles gives every row the same bits.

    Raises `RuntimeError` where no tile does: no promise of equal bits could be kept.
    """
    run = _trial(model, model.step, MAX_ROWS, ())
    rows = torch.arange(MAX_ROWS)
    wanted = run(rows)
    for tile in _TILES:
        sizes = (size for size in _SIZES if size % tile == 0)
        places = (rows.flip(0), *(rows[-size:] for size in sizes))
        if all(torch.equal(run(place), wanted[place]) for place in places):
            return tile
    raise RuntimeError("the matrix library gives a row other bits at other places in a batch")


@torch.inference_mode()
def chunk_batch(model: LanguageModel, size: int) -> int:
    """How many chunks of ``size`` tokens may share a call without changing a bit; at least 1."""
    for batch in _BATCHES:
        run = _trial(model, model.hidden_chunk, batch, (size,))
        rows = torch.arange(batch)
        wanted = run(rows)
        places = (rows.flip(0), *(rows[-num:] for num in range(1, batch)))
        if all(torch.equal(run(place), wanted[place]) for place in places):
            return batch
    return 1


def _trial(
    model: LanguageModel, forward: Forward, batch: int, shape: tuple[int, ...]
) -> Callable[[Tensor], Tensor]:
    """A run of chosen rows of one random batch; gives all their outputs and states as bytes.

    The states are those of random texts. Random numbers in their place would do
    worse: sums of positive features, say, would have both signs, and a
    denominator near zero drowns the differences that are looked for.
    """
    device = model.head_weight.device
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.vocab_size
    before, tokens = (
        torch.randint(vocab_size, (batch, *size), generator=generator).to(device)
        for size in ((PAST_TOKENS,), shape)
    )
    start = torch.zeros(batch, dtype=torch.int64, device=device)
    _, state = model.hidden_chunk(before, model.empty_state(batch), start)

    def run(rows: Tensor) -> Tensor:
        part = tuple({name: t[rows] for name, t in layer.items()} for layer in state)
        output, after = forward(tokens[rows], part, start[rows] + PAST_TOKENS)
        tensors = [output, *(t for layer in after for t in layer.values())]
        flat = [t.reshape(len(rows), -1).contiguous().view(torch.uint8) for t in tensors]
        return torch.cat(flat, dim=1)

    return run
