"""The model that is made: the source's weights, low-rank updates, and the plan's attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model.convert.linearize.plan import LlamaShape, Plan
from model.convert.linearize.source import (
    Llama,
    angles,
    full_attention,
    matrix_sizes,
    merged,
    rotate,
    rotated,
    rotated_at_most,
)
from model.families.llama.config import LayerPlan
from model.families.llama.network import DeltaFar, RelativeFar, far_part

# -------------------------------------------------------------------------------------------------
# The exact part of a layer: softmax over the last W tokens and the first ones of the text.
#
#     o_i = sum_j softmax_j(q_i . k_j / sqrt(K)) v_j,   over j <= i with i - j < W or j < sinks
#
# Time and memory are linear in the number of tokens: blocks of C queries see W + C keys, of which
# the mask keeps W, and the first keys.


#: Queries in a block, if the window is that long and there are as many.
MIN_BLOCK, MAX_BLOCK = 32, 256


def near_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int, to_sinks: Tensor | None = None
) -> Tensor:
    """Rotated q [B, H, T, K] and k, v [B, H_kv, T, K] to o [B, H, T, K].

    ``to_sinks`` [B, H, T, K] are the queries that see the first tokens once these have left the
    window, where they are turned otherwise.
    """
    num_tokens = q.shape[2]
    head = full_attention(*(t[:, :, :window] for t in (q, k, v)))
    if num_tokens <= window:
        return head
    block = block_size(window, num_tokens - window)
    group = q.shape[1] // k.shape[1]
    padding = (0, 0, 0, -(num_tokens - window) % block)
    keys, values = (_seen(F.pad(t, padding), block, window, sinks) for t in (k, v))

    def scored(q: Tensor, keys: Tensor) -> Tensor:
        # Queries of one group lie under each other, because they see the same keys.
        rows = F.pad(q, padding)[:, :, window:].unflatten(1, (-1, group)).unflatten(3, (-1, block))
        rows = rows.transpose(2, 3).flatten(3, 4)  # [B, H_kv, N, G C, K]
        scores: Tensor = (rows * q.shape[-1] ** -0.5) @ keys.transpose(-1, -2)
        return scores

    scores = scored(q, keys)
    if to_sinks is not None:
        near = keys.shape[3] - sinks
        first = scored(to_sinks, keys[:, :, :, near:])
        scores = torch.cat([scores[..., :near], first], dim=-1)
    mask = _mask(scores.shape[2], block, window, sinks, q.device)
    scores = scores.unflatten(3, (group, block)).masked_fill(~mask.unsqueeze(1), -torch.inf)
    o = scores.softmax(dim=-1).flatten(3, 4) @ values
    o = o.unflatten(3, (group, block)).transpose(2, 3).flatten(1, 2).flatten(2, 3)
    return torch.cat([head, o[:, :, : num_tokens - window]], dim=2)


def block_size(window: int, num_queries: int) -> int:
    """The largest divisor of ``window`` that a block of ``num_queries`` may have."""
    most = min(window, MAX_BLOCK, max(MIN_BLOCK, num_queries))
    return max(size for size in range(1, most + 1) if window % size == 0)


def _seen(x: Tensor, block: int, window: int, sinks: int) -> Tensor:
    """What each block of queries sees of keys or values [B, H_kv, T, K].

    The first block begins at position ``window``. Returns [B, H_kv, N, W + C + sinks, K].
    """
    blocks = x.unflatten(2, (-1, block))
    num_before = window // block
    num_blocks = blocks.shape[2] - num_before
    around = [blocks[:, :, start : start + num_blocks] for start in range(num_before + 1)]
    first = x[:, :, None, :sinks].expand(-1, -1, num_blocks, -1, -1)
    return torch.cat([*around, first], dim=3)


def _mask(num_blocks: int, block: int, window: int, sinks: int, device: torch.device) -> Tensor:
    """[N, C, W + C + sinks] bool, of what `_seen` gives: what a query attends to."""
    query = window + torch.arange(num_blocks * block, device=device).view(num_blocks, block, 1)
    start = torch.arange(num_blocks, device=device).view(-1, 1, 1) * block
    distance = query - start - torch.arange(window + block, device=device)
    near = (distance >= 0) & (distance < window)
    # Each of the first tokens once: by itself as soon as the window has left it.
    first = query - torch.arange(sinks, device=device) >= window
    return torch.cat([near, first], dim=-1)


# -------------------------------------------------------------------------------------------------
# An update is that of Hu et al. 2021 ("LoRA"), W + 2 B A, with A [r, columns] random and B zero at
# the start. q, k and v share one A.


#: What the product of A and B is multiplied by.
LORA_SCALE = 2.0


class LowRank(nn.Module):
    """An update of a matrix [rows, columns]."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(rank, columns))
        self.b = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the product with ``x`` [..., columns]."""
        return F.linear(F.linear(x, self.a), self.b) * LORA_SCALE

    def delta(self) -> Tensor:
        """What is added to the matrix."""
        return LORA_SCALE * self.b @ self.a


class FullUpdate(nn.Module):
    """An update of a matrix [rows, columns] whose rank has no bound."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.change = nn.Parameter(torch.zeros(rows, columns))

    def delta(self) -> Tensor:
        """What is added to the matrix."""
        return self.change


class StudentLayer(nn.Module):
    """What a layer has besides the source's weights."""

    def __init__(self, shape: LlamaShape, plan: LayerPlan, ranks: dict[str, int]) -> None:
        super().__init__()
        self.plan = plan
        self.far = far_part(plan, shape.num_heads, shape.num_kv_heads, shape.head_dim)
        sizes = matrix_sizes(shape)
        self.updates = nn.ModuleDict(
            {
                name: LowRank(*sizes[name], rank) if rank else FullUpdate(*sizes[name])
                for name, rank in ranks.items()
            }
        )

    def linear(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """The product of ``x`` with the source's ``weight`` and its update, if it has one."""
        update = dict(self.updates.items()).get(name)
        if isinstance(update, FullUpdate):
            return F.linear(x, weight + update.change)
        y = F.linear(x, weight)
        return y if update is None else y + update(x)


class Student(nn.Module):
    """``source`` with constant state. Its parameters are the far parts and the updates alone.

    ``ranks`` are those of the updates of the matrices of `matrix_sizes`; those not named have none,
    and with 0 all of a matrix is trained. The first tokens are seen no farther away than
    ``farthest``, as when it is served; 0 is no bound.
    """

    def __init__(self, source: Llama, plan: Plan, ranks: dict[str, int], farthest: int = 0) -> None:
        super().__init__()
        assert len(plan.layers) == source.shape.num_layers, (len(plan.layers), source.shape)
        assert ranks.keys() <= matrix_sizes(source.shape).keys(), ranks
        self._source = [source]  # in a list, so that its weights are not this module's
        self.plan, self.ranks, self.farthest = plan, ranks, farthest
        self.layers = nn.ModuleList(
            StudentLayer(source.shape, layer, ranks) for layer in plan.layers
        )
        #: Without far parts a layer forgets what leaves its window, to see what they add.
        self.with_far = True

    def far(self, index: int) -> RelativeFar | DeltaFar | None:
        """The far part of layer ``index``, if it is used."""
        return self.layer(index).far if self.with_far else None

    def window(self, index: int, max_ring: int | None = None) -> int:
        """The window of layer ``index``, which `hidden` may shorten."""
        plan = self.plan.layers[index]
        return min(plan.window, max_ring) if max_ring and plan.far == "delta" else plan.window

    @property
    def source(self) -> Llama:
        """The model whose weights are used."""
        return self._source[0]

    def layer(self, index: int) -> StudentLayer:
        """What layer ``index`` has of its own."""
        layer = self.layers[index]
        assert isinstance(layer, StudentLayer)
        return layer

    def init_weights(self, generator: torch.Generator) -> None:
        """Draws the A of all updates; all else starts as it was made."""
        for name, parameter in self.named_parameters():
            if name.endswith(".a"):
                with torch.no_grad():
                    parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)

    def hidden(self, ids: Tensor, max_ring: int | None = None, recompute: bool = False) -> Tensor:
        """``ids`` [B, T] to the input of the head [B, T, D].

        ``max_ring`` shortens the windows of layers with a delta far part, so that it is trained on
        short texts. With ``recompute`` the backward pass has the memory of one layer, and computes
        all of them again.
        """
        x = self.source.embedded(ids)
        for index in range(len(self.layers)):
            if recompute:
                x = checkpoint(self.after_layer, index, x, max_ring, use_reentrant=False)
            else:
                x = self.after_layer(index, x, max_ring)
        return self.source.final_norm(x)

    def after_layer(self, index: int, x: Tensor, max_ring: int | None = None) -> Tensor:
        """The residual stream [B, T, D] after layer ``index``."""
        own, source = self.layer(index), self.source.layer(index)
        normed = self.source.attention_input(index, x)
        q, k, v = self.source.heads(index, own.linear("qkv", normed, source.qkv))
        o = self.attention(index, q, k, v, max_ring)
        x = x + own.linear("out", merged(o), source.out)
        return self.source.after_mlp(index, x, own.linear)

    def attention(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, max_ring: int | None = None
    ) -> Tensor:
        """From q [B, H, T, K] and k, v [B, H_kv, T, K] of whole texts, not rotated, to o."""
        far, sinks, window = self.far(index), self.plan.sinks, self.window(index, max_ring)
        shape, farthest = self.source.shape, self.farthest
        is_longer = farthest and q.shape[2] > farthest
        to_sinks = rotated_at_most(q, farthest, shape) if is_longer else None
        near = near_attention(*rotated(q, k, shape), v, window, sinks, to_sinks)
        if far is None or q.shape[2] <= window + sinks:
            return near
        queries, old = q[:, :, window:], slice(0, q.shape[2] - window)
        keep = (torch.arange(queries.shape[2], device=q.device) >= sinks).to(q.dtype)
        num, den, _ = far.chunk(
            queries, k[:, :, old], v[:, :, old], keep.view(1, 1, -1, 1), far.empty_state(len(q))
        )
        joined = (near[:, :, window:] + num) / (1.0 + den)
        return torch.cat([near[:, :, :window], joined], dim=2)

    @torch.no_grad()
    def merged_source(self) -> Llama:
        """A copy of the source with the updates in its weights, for a student without any."""
        merged_model = Llama(self.source.shape)
        merged_model.load_state_dict(self.source.state_dict())
        for index in range(len(self.layers)):
            for name, update in self.layer(index).updates.items():
                assert isinstance(update, LowRank | FullUpdate)
                getattr(merged_model.layer(index), name).add_(update.delta())
        return merged_model


# -------------------------------------------------------------------------------------------------
# The step form of a student: one token of each row, with a state of constant size.
#
# A layer keeps rotated keys and values of the first tokens and of the last W others, in a ring, in
# 16 bits. A token that the ring drops enters the far part, its key turned back by its position.
# Here this form is for chats with a student, and to show what its state is.


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
    nearest = positions.clamp_max(student.farthest - 1) if student.farthest else positions
    to_sinks = rotate(q, *_angles(student, nearest))
    near = _near(rotate(q, cos, sin), to_sinks, state, positions, sinks)
    if far is not None:
        near = (near + num[:, :, 0]) / (1.0 + den[:, :, 0])
    return near.flatten(1)


def _near(q: Tensor, to_sinks: Tensor, state: LayerState, positions: Tensor, sinks: int) -> Tensor:
    """Softmax over the slots that have a token, to [R, H, K].

    ``q`` [R, H, K] is rotated for the window, ``to_sinks`` for the first tokens.
    """
    num_kv_heads = state.keys.shape[1]
    filled = torch.arange(state.keys.shape[2], device=q.device) <= positions.unsqueeze(1)
    keys, values = state.keys.to(q.dtype), state.values.to(q.dtype)
    scores = torch.cat(
        [
            turned.unflatten(1, (num_kv_heads, -1)) @ part.transpose(-1, -2)
            for turned, part in ((to_sinks, keys[:, :, :sinks]), (q, keys[:, :, sinks:]))
        ],
        dim=-1,
    )
    scores = (scores * q.shape[-1] ** -0.5).masked_fill(~filled[:, None, None], -torch.inf)
    o: Tensor = scores.softmax(dim=-1) @ values
    return o.flatten(1, 2)


def _angles(student: Student, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [R, 1, K/2]."""
    cos, sin = angles(positions, student.source.shape)
    return cos.unsqueeze(1), sin.unsqueeze(1)
