"""Finds batch sizes in which the matrix library gives each row the same bits.

A library picks its kernel by the shape of a product, and kernels add in different
orders. So a row's bits may change with the number of rows in its batch, and with
its place among them: the last rows may go through other instructions than the
first. `row_sizes` runs the model's own `step` at a few batch sizes and returns
those in which every place of every size gives a row the same bits. Batches of
these sizes are all that the runner makes, so what is tried is all that is used.
In most sums another order changes no bit, above all where they are rounded to
bfloat16; so products of the weights' shapes are tried with numbers that tell.

Size 1 needs no trial: a row alone always has the same shapes. Where nothing else
can be had, steps run one row at a time: slowly, with the same bits.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.network import Network

logger = logging.getLogger("everstream.engine")

#: Batch sizes of `step` that are tried.
SIZES = (1, 4, 8, 16, 32, 64)

#: What the texts of a trial have before them: more than a window of the usual length.
PAST_TOKENS = 100

#: How much larger than the others the terms are that cancel.
LARGE = 2.0**20

#: A batch is padded where at least this part of it is used.
MIN_USE = 0.6

#: Results by model and number of threads; what else they depend on does not change in a process.
_known: weakref.WeakKeyDictionary[Network, dict[int, tuple[int, ...]]]
_known = weakref.WeakKeyDictionary()


def row_sizes(model: Network) -> tuple[int, ...]:
    """Batch sizes, ascending, such that `step` gives a row the same bits in all of them.

    Tried once for each model and number of threads.
    """
    known, num_threads = _known.setdefault(model, {}), torch.get_num_threads()
    if num_threads not in known:
        known[num_threads] = _tried(model)
        shown = ", ".join(map(str, known[num_threads]))
        logger.info("torch computes the same bits for a row in batches of %s rows", shown)
    return known[num_threads]


def batches(num_rows: int, sizes: tuple[int, ...]) -> list[int]:
    """The sizes of the batches that take ``num_rows``; the last may have more room than rows."""
    parts = []
    while num_rows > 0:
        holds = min((size for size in sizes if size >= num_rows), default=sizes[-1])
        fills = max((size for size in sizes if size <= num_rows), default=holds)
        parts.append(holds if num_rows >= MIN_USE * holds else fills)
        num_rows -= parts[-1]
    return parts


@torch.inference_mode()
def _tried(model: Network) -> tuple[int, ...]:
    """The largest set of sizes that agree; of equally large ones that with the smaller sizes."""
    run = _trial(model)
    groups: list[tuple[Tensor, list[int]]] = []
    for size in SIZES:
        bits = _bits_everywhere(run, size)
        if bits is None:
            continue
        for known, sizes in groups:
            if torch.equal(known, bits):
                sizes.append(size)
                break
        else:
            groups.append((bits, [size]))
    return max((tuple(sizes) for _, sizes in groups), key=len)


def _bits_everywhere(run: Callable[[Tensor], Tensor], size: int) -> Tensor | None:
    """The bits of two texts, [2, bytes], if each has the same at every place of a batch."""
    place = torch.arange(size)
    first, second = run(place % 2), run((place + 1) % 2)
    bits = torch.stack([first[0], second[0]])
    agree = torch.equal(first, bits[place % 2]) and torch.equal(second, bits[(place + 1) % 2])
    return bits if agree else None


def _trial(model: Network) -> Callable[[Tensor], Tensor]:
    """A run of chosen rows of two texts; gives all that it computes as bytes [rows, bytes].

    That is the logits and states of `step`, and the products of `_products`. The states
    are those of random texts. Random numbers in their place would do worse: sums of
    positive features, say, would have both signs, and a denominator near zero drowns the
    differences that are looked for.
    """
    device = model.head_weight.device
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(model.config.vocab_size, (2, PAST_TOKENS + 1), generator=generator)
    texts = texts.to(device)
    start = torch.zeros(2, dtype=torch.int64, device=device)
    _, state = model.hidden_chunk(texts[:, :-1], model.empty_state(2), start)
    products = _products(model, generator)

    def run(rows: Tensor) -> Tensor:
        part = tuple({name: t[rows] for name, t in layer.items()} for layer in state)
        logits, after = model.step(texts[rows, -1], part, start[rows] + PAST_TOKENS)
        tensors = [logits, *(t for layer in after for t in layer.values())]
        tensors += [product(rows) for product in products]
        flat = [t.reshape(len(rows), -1).contiguous().view(torch.uint8) for t in tensors]
        return torch.cat(flat, dim=1)

    return run


def _products(model: Network, generator: torch.Generator) -> list[Callable[[Tensor], Tensor]]:
    """Products like those with the model's weights, one for each shape, of numbers that tell."""
    like = {(model.head_weight.shape, False, model.head_weight.dtype)}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight, has_bias = module.weight, module.bias is not None
            # Some layers compute in float32, whatever the model's dtype.
            like |= {(weight.shape, has_bias, dtype) for dtype in (weight.dtype, torch.float32)}
    return [_product(*each, generator) for each in sorted(like, key=str)]


def _product(
    shape: torch.Size, has_bias: bool, dtype: torch.dtype, generator: torch.Generator
) -> Callable[[Tensor], Tensor]:
    """The product of chosen rows of two inputs with a matrix of this shape and equal rows.

    Half of the terms are large and cancel in pairs, and how much of the others is lost
    between them depends on the order of all.
    """
    num_outputs, width = shape
    first, second = torch.randperm(width, generator=generator)[: width // 4 * 2].chunk(2)
    inputs, weights = torch.randn(3, width, generator=generator).split([2, 1])
    inputs[:, second] = inputs[:, first]
    weights[:, first] *= LARGE
    weights[:, second] = -weights[:, first]
    inputs, weights = inputs.to(dtype), weights.to(dtype)
    bias = torch.zeros(num_outputs, dtype=dtype) if has_bias else None
    return lambda rows: F.linear(inputs[rows], weights.repeat(num_outputs, 1), bias)
