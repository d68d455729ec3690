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
    for field in layout.fields:
        part = blocks[:, field.offset : field.offset + field.spec.num_bytes]
        tensor = part.view(DTYPES[field.spec.dtype]).unflatten(1, field.spec.shape)
        layers[field.layer][field.name] = tensor
    return tuple(layers)
