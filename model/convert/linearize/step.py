"""The step form of a student: one token of each row, with a state of constant size.

A layer keeps rotated keys and values of the first tokens and of the last W others, in a ring, in 16
bits. A token that the ring drops enters the far part, its key turned back by its position. Here
this form is for chats with a student, and to show what its state is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model.convert.linearize.network import angles, rotate
from model.convert.linearize.student import Student


@dataclass
class LayerState:
    """``keys``, ``values`` [R, H_kv, sinks + W, K], and the state of the far part."""

    keys: Tensor
    values: Tensor
    far: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        tensors = [self.keys, self.values] + ([] if self.far is None else [self.far])
        return sum(tensor[0].nbytes for tensor in tensors)


@dataclass
class StepState:
    """``positions`` [R] are how many tokens each row has read."""

    layers: list[LayerState]
    positions: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of one row, but for its position."""
        return sum(layer.num_bytes for layer in self.layers)


def empty_state(student: Student, rows: int, dtype: torch.dtype = torch.float16) -> StepState:
    """The state before the first token, with keys and values in ``dtype``."""
    shape, sinks = student.source.shape, student.plan.sinks
    device = student.source.norm.device
    layers = []
    for index, plan in enumerate(student.plan.layers):
        size = (rows, shape.num_kv_heads, sinks + plan.window, shape.head_dim)
        keys, values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        far = student.far(index)
        layers.append(LayerState(keys, values, None if far is None else far.empty_state(rows)))
    return StepState(layers, torch.zeros(rows, dtype=torch.int64, device=device))


@torch.no_grad()
def step(student: Student, state: StepState, ids: Tensor) -> Tensor:
    """Reads a token of each row, ``ids`` [R], into ``state``; the input of the head [R, D]."""
    source = student.source
    x = source.embedded(ids)
    for index, layer in enumerate(state.layers):
        own, weights = student.layer(index), source.layer(index)
        qkv = own.linear("qkv", source.attention_input(index, x), weights.qkv)
        o = _attention(student, index, layer, state.positions, qkv)
        x = x + own.linear("out", o, weights.out)
        x = source.after_mlp(index, x, own.linear)
    state.positions += 1
    return source.final_norm(x)


def _attention(
    student: Student, index: int, state: LayerState, positions: Tensor, qkv: Tensor
) -> Tensor:
    """From [R, (H + 2 H_kv) K] to [R, H K]; the token enters ``state``."""
    sinks = student.plan.sinks
    window, far = student.plan.layers[index].window, student.far(index)
    q, k, v = (t[:, :, 0] for t in student.source.heads(index, qkv.unsqueeze(1)))
    slots = torch.where(positions < sinks, positions, sinks + (positions - sinks) % window)
    rows = torch.arange(len(slots), device=slots.device)
    if far is not None:
        cos, sin = _angles(student, positions - window)
        old_k = rotate(state.keys[rows, :, slots].float(), cos, -sin)
        old_v = state.values[rows, :, slots].float()
        keep = (positions >= sinks + window).to(q.dtype).view(-1, 1, 1, 1)
        assert state.far is not None, index
        num, den, state.far = far.chunk(
            q.unsqueeze(2), old_k.unsqueeze(2), old_v.unsqueeze(2), keep, state.far
        )
    cos, sin = _angles(student, positions)
    state.keys[rows, :, slots] = rotate(k, cos, sin).to(state.keys.dtype)
    state.values[rows, :, slots] = v.to(state.values.dtype)
    near = _near(rotate(q, cos, sin), state, positions)
    if far is not None:
        near = (near + num[:, :, 0]) / (1.0 + den[:, :, 0])
    return near.flatten(1)


def _near(q: Tensor, state: LayerState, positions: Tensor) -> Tensor:
    """Softmax over the slots that have a token: rotated q [R, H, K] to [R, H, K]."""
    num_kv_heads = state.keys.shape[1]
    filled = torch.arange(state.keys.shape[2], device=q.device) <= positions.unsqueeze(1)
    grouped = q.unflatten(1, (num_kv_heads, -1))
    keys, values = state.keys.to(q.dtype), state.values.to(q.dtype)
    o = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=filled[:, None, None])
    return o.flatten(1, 2)


def _angles(student: Student, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [R, 1, K/2]."""
    cos, sin = angles(positions, student.source.shape)
    return cos.unsqueeze(1), sin.unsqueeze(1)
