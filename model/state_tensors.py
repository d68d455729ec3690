"""A session's block of state as torch tensors; where they lie is `model.state`'s."""

from __future__ import annotations

import torch
from torch import Tensor

from model.architectures.network import DTYPES, ModelState
from model.state import StateLayout


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
