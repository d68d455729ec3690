"""The model that is made: the source's weights, low-rank updates of them, and the plan's attention.

An update is that of Hu et al. 2021 ("LoRA"), W + 2 B A, with A [r, columns] random and B zero at
the start. q, k and v share one A.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.llama.delta import DeltaFar
from model.architectures.llama.layer_plan import LayerPlan
from model.architectures.llama.network import far_part
from model.architectures.llama.relative import RelativeFar
from model.convert.linearize.near import near_attention
from model.convert.linearize.network import Llama, matrix_sizes, merged, rotated
from model.convert.linearize.plan import LlamaShape, Plan

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
    and with 0 all of a matrix is trained.
    """

    def __init__(self, source: Llama, plan: Plan, ranks: dict[str, int]) -> None:
        super().__init__()
        assert len(plan.layers) == source.shape.num_layers, (len(plan.layers), source.shape)
        assert ranks.keys() <= matrix_sizes(source.shape).keys(), ranks
        self._source = [source]  # in a list, so that its weights are not this module's
        self.plan, self.ranks = plan, ranks
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

    def hidden(self, ids: Tensor, max_ring: int | None = None) -> Tensor:
        """``ids`` [B, T] to the input of the head [B, T, D].

        ``max_ring`` shortens the windows of layers with a delta far part, so that it is trained on
        short texts.
        """
        x = self.source.embedded(ids)
        for index in range(len(self.layers)):
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
        near = near_attention(*rotated(q, k, self.source.shape), v, window, sinks)
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
