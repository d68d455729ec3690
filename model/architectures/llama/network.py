"""Llama (Touvron et al. 2023, arXiv 2302.13971), and what differs from it by options of attention.

Every layer is `model.architectures.bounded_attention` and a SwiGLU. In a model of constant state
the past of a layer is its window, and a far part has what left it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.architectures.bounded import SINKS
from model.architectures.bounded_attention import BoundedAttention, past_rows
from model.architectures.decoder import Decoder
from model.architectures.llama.config import LlamaConfig
from model.architectures.llama.delta import DeltaFar
from model.architectures.llama.layer_plan import LayerPlan
from model.architectures.llama.relative import RelativeFar
from model.architectures.network import State


class Llama(Decoder):
    """See `model.architectures.network.Network`."""

    def __init__(self, config: LlamaConfig) -> None:
        mixers = [LlamaAttention(config, layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, mixers, config.norm_eps, config.tied)


class LlamaAttention(BoundedAttention):
    """The attention of a layer, with a far part where the layer has one."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        rotates = layer not in config.unrotated_layers
        plan = config.windows[layer] if config.windows else None
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            rotary_dim=config.head_dim if rotates else 0,
            rope_theta=config.rope_theta,
            rope_factors=config.rope_factors if rotates else (),
            eps=config.norm_eps,
            qk_norm=config.qk_norm,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            context=plan.context if plan else config.context,
            farthest=config.max_context if plan else 0,
        )
        sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.far = far_part(plan, *sizes) if plan else None

    def with_far(
        self,
        y: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        position: Tensor,
        at: Tensor,
    ) -> tuple[Tensor, State]:
        """See `BoundedAttention`. With each token another leaves the window, once it is full."""
        if self.far is None:
            return y, {}
        leaves = at - (self.context - SINKS)
        keep = (leaves >= SINKS)[:, None, :, None].float()
        keys, values = (
            torch.cat([held.float(), new], dim=1)
            for held, new in zip(past_rows(state), (k, v), strict=True)
        )
        # What leaves is in its place of the past, or one of the new tokens.
        places = SINKS + (leaves.clamp(min=SINKS) - SINKS) % (self.context - SINKS)
        new = self.context + leaves - position[:, None]
        index = torch.where(leaves < position[:, None], places, new)[..., None, None]
        keys, values = (x.gather(1, index.expand(-1, -1, *x.shape[2:])) for x in (keys, values))
        sums = state["S"]
        if "z" in state:
            sums = torch.cat([sums, state["z"].unsqueeze(-1)], dim=-1)
        num, den, sums = self.far.chunk(
            q.transpose(1, 2),
            self.rotate(keys, -leaves).transpose(1, 2),
            values.transpose(1, 2),
            keep,
            sums,
        )
        after = {"S": sums[..., : self.head_dim]}
        if "z" in state:
            after["z"] = sums[..., self.head_dim]
        return ((y.transpose(1, 2) + num) / (1.0 + den)).transpose(1, 2), after

    def init_weights(self, generator: torch.Generator) -> None:
        """Sets what `Decoder.init_weights` leaves to mixers: a far part starts as it is made."""
        if self.far is not None:
            self.far.init_weights()


def far_part(
    plan: LayerPlan, num_heads: int, num_kv_heads: int, head_dim: int
) -> RelativeFar | DeltaFar | None:
    """The module of a layer's far part, as it starts."""
    if plan.far == "none":
        return None
    part = RelativeFar if plan.far == "relative" else DeltaFar
    return part(num_heads, num_kv_heads, head_dim, plan.features)
