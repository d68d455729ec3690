"""A session's block of state as torch tensors; where they lie is `model.state`'s.

Sums in bfloat16 are rounded after every token, up or down at random, with probabilities by which
the mean is the number itself: to the nearest, what is less than half of the last bit would be lost
every time. The random bits of a token are a hash of the numbers' places in the block, chosen by the
token's position: the same in any batch, cut, fork and replay. It is multiply-shift (Dietzfelbinger
1996, "Universal hashing and k-wise independent random variables via integer arithmetic without
primes"): those of any two places are independent, so that errors add up like independent ones.
`model/ops/cpu/src/runtime/sums.h` has the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.architectures.network import DTYPES, ModelState
from model.state import Field, StateLayout

_LOW, _ALL = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def state_views(layout: StateLayout, blocks: Tensor) -> ModelState:
    """The tensors inside ``blocks`` [B, num_bytes] uint8, sharing its memory."""
    assert blocks.dtype == torch.uint8 and blocks.shape[1] == layout.num_bytes, blocks.shape
    layers: list[dict[str, Tensor]] = [{} for _ in range(layout.num_layers)]
    groups = layout.num_groups, layout.group_bytes
    past = blocks[:, layout.fixed_bytes :].unflatten(1, groups) if layout.num_groups else blocks
    for field in layout.fields:
        shape, size = field.spec.shape, field.spec.num_bytes
        if field.stride:
            begin, size, shape = field.offset - layout.fixed_bytes, size // shape[0], shape[1:]
            part = past[..., begin : begin + size]
        else:
            part = blocks[:, field.offset : field.offset + size]
        tensor = part.view(DTYPES[field.spec.dtype]).unflatten(-1, shape)
        layers[field.layer][field.name] = tensor
    return tuple(layers)


def rounded_fields(layout: StateLayout) -> list[Field]:
    """The tensors that the block has in bfloat16."""
    return [field for field in layout.fields if field.spec.dtype == "bfloat16"]


def widened(fields: list[Field], state: ModelState) -> ModelState:
    """``state`` with ``fields`` as a step computes them, exactly; the others are the same."""
    layers = [dict(layer) for layer in state]
    for field in fields:
        stored = layers[field.layer][field.name]
        layers[field.layer][field.name] = stored.to(DTYPES[field.computed])
    return tuple(layers)


def rounded(fields: list[Field], state: ModelState, position: Tensor) -> ModelState:
    """``state`` after the tokens at ``position`` [B] int64, with ``fields`` in bfloat16."""
    layers = [dict(layer) for layer in state]
    for field in fields:
        values = layers[field.layer][field.name]
        bits = random_bits(field.offset // 2, values[0].numel(), position).view(values.shape)
        layers[field.layer][field.name] = round_at_random(values, bits)
    return tuple(layers)


def round_at_random(values: Tensor, bits: Tensor) -> Tensor:
    """``values`` in bfloat16: up where the bits that are lost and ``bits`` sum to a whole one.

    ``bits`` are int64 of 16 random bits. What is not finite stays so.
    """
    values = values.float()
    exact = values.contiguous().view(torch.int32).to(torch.int64) & _LOW
    sums = torch.where(values < torch.inf, exact + bits, exact)
    return (sums >> 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)


def random_bits(first: int, count: int, position: Tensor) -> Tensor:
    """16 bits for each number from place ``first`` on, at each of ``position`` [B]: [B, count]."""
    places = torch.arange(first, first + count, dtype=torch.int64)
    hashes = [_split_mix(at) for at in position.tolist()]
    factors = torch.tensor([hash >> 32 | 1 for hash in hashes])
    terms = torch.tensor([hash & _LOW for hash in hashes])
    return ((places * factors[:, None] + terms[:, None]) & _LOW) >> 16


def _split_mix(x: int) -> int:
    """SplitMix64 (Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _ALL
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ALL
    return x ^ (x >> 31)
