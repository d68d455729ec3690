"""The first stage: each layer's far part learns to give what the source's attention gives.

All layers at once and each on its own: the input of a layer is the source's, so that a step costs
one forward pass of the source and those of the far parts. The error of a layer is

    |(o - o_source) W_out|^2 / |o_source W_out|^2     over the tokens that the window does not reach
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model.convert.linearize.network import full_attention, merged, rotated
from model.convert.linearize.student import Student


def match_layers(
    student: Student, ids: Tensor, max_ring: int | None = None, share: float = 1.0
) -> dict[int, float]:
    """Adds ``share`` times the gradients of all layers' errors on texts [B, T] to the far parts.

    ``max_ring`` is that of `Student.hidden`. Returns ``share`` times the errors by layer; a far
    part that no token reaches has none.
    """
    source, errors = student.source, {}
    x = source.embedded(ids)
    for index in range(source.shape.num_layers):
        layer = source.layer(index)
        with torch.no_grad():
            normed = source.attention_input(index, x)
            q, k, v = source.heads(index, F.linear(normed, layer.qkv))
            wanted = merged(full_attention(*rotated(q, k, source.shape), v))
            output = F.linear(wanted, layer.out)
        window = student.window(index, max_ring) + student.plan.sinks
        if student.far(index) is not None and ids.shape[1] > window:
            found = merged(student.attention(index, q, k, v, max_ring))
            missing = F.linear((found - wanted)[:, window:], layer.out)
            size = output[:, window:].float().square().sum()
            error = share * missing.float().square().sum() / size
            with torch.autocast(ids.device.type, enabled=False):
                error.backward()
            errors[index] = error.item()
        with torch.no_grad():
            x = source.after_mlp(index, x + output)
    return errors
