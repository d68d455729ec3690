"""Llama in torch, with all of its past or with a state of constant size."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.decoder import BoundedAttention, Decoder, past_rows
from model.architectures.hybrid import SINKS
from model.architectures.network import State
from model.families.llama.config import LayerPlan, LlamaConfig
from model.ops.delta import delta_chunk

# -------------------------------------------------------------------------------------------------
# The far part of most layers: bounded features of what left the window, next to the near sum.
#
#     phi_k(k) = softmax([k U, -k U])                      U per head of keys
#     phi_q(q) = exp(a . q / sqrt(K) + b) softmax([q W, -q W])    W, a, b per head of queries
#     S = sum phi_k(k_j) v_j^T,   z = sum phi_k(k_j)       over j that left the window
#     o = (o_near + phi_q S) / (1 + phi_q z)
#
# k and q are not rotated. The features are those of Zhang et al. 2024 ("The Hedgehog & the
# Porcupine", eq. 6) and of LoLCATs (Zhang et al. 2024, eq. 6), which sums near weights at an
# absolute scale; here o_near is the finished near average, so that far weights are relative to the
# near sum: many heads rest on the first token for most queries, and a far weight that does not
# shrink with it adds noise. Nothing needs a running maximum, because features are in (0, 1).


BLOCK = 64


class FarMaps(nn.Module):
    """What both far parts have: the maps to features U and W, and a query's weight, a and b."""

    #: b at the start.
    initial_scale: ClassVar[float]

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, features: int) -> None:
        super().__init__()
        self.key_map = nn.Parameter(torch.empty(num_kv_heads, head_dim, features // 2))
        self.query_map = nn.Parameter(torch.empty(num_heads, head_dim, features // 2))
        self.scale = nn.Parameter(torch.empty(num_heads, head_dim))
        self.bias = nn.Parameter(torch.empty(num_heads))
        FarMaps.init_weights(self)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Features of the first channels themselves, and the same small weight for all queries."""
        for part in (self.key_map, self.query_map):
            part.copy_(torch.eye(*part.shape[1:]).expand_as(part))
        self.scale.zero_()
        self.bias.fill_(self.initial_scale)


class RelativeFar(FarMaps):
    """See the module's docstring. At the start exp of ``initial_scale`` weighs its features."""

    initial_scale = -2.2

    def key_features(self, k: Tensor) -> Tensor:
        """phi_k: [B, H_kv, T, K] to [B, H_kv, T, m]."""
        return signed_softmax(k @ self.key_map.to(k.dtype))

    def query_features(self, q: Tensor) -> Tensor:
        """phi_q: [B, H, T, K] to [B, H, T, m]."""
        return signed_softmax(q @ self.query_map.to(q.dtype)) * far_weight(q, self.scale, self.bias)

    def empty_state(self, rows: int) -> Tensor:
        """S and, in the last column, z: zeros [rows, H_kv, m, K + 1]."""
        num_kv_heads, width, half = self.key_map.shape
        return self.key_map.new_zeros(rows, num_kv_heads, 2 * half, width + 1)

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Reads T queries, before each of which a token enters the far part.

        ``q`` [B, H, T, K]; ``k``, ``v`` [B, H_kv, T, K] of the tokens that enter, not rotated;
        ``keep`` [B or 1, 1, T, 1] is 0 where none does, which is at the
        beginning of a text, and then 1. Returns phi_q S [B, H, T, K], phi_q z
        [B, H, T, 1] and the state after them.
        """
        features = self.key_features(k) * keep
        values = F.pad(v, (0, 1), value=1.0)
        sums, state = causal_sums(self.query_features(q), features, values, state)
        return sums[..., :-1], sums[..., -1:], state


def signed_softmax(x: Tensor) -> Tensor:
    """softmax([x, -x]): [..., m] to [..., 2 m]."""
    return torch.cat([x, -x], dim=-1).softmax(dim=-1)


def far_weight(q: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """exp(a . q / sqrt(K) + b) [B, H, T, 1] of q [B, H, T, K], a [H, K] and b [H]."""
    along = q @ (scale.to(q.dtype) / math.sqrt(q.shape[-1])).unsqueeze(-1)
    return (along + bias.view(-1, 1, 1)).exp()


def causal_sums(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(state + sum_{j <= i} k_j v_j^T)^T q_i in blocks.

    ``q`` [B, H, T, m], ``k`` [B, H_kv, T, m], ``v`` [B, H_kv, T, V], ``state`` [B, H_kv, m, V].
    Returns [B, H, T, V] and the state after T tokens.
    """
    num_tokens, group = q.shape[2], q.shape[1] // k.shape[1]
    block = min(BLOCK, num_tokens)
    padding = -num_tokens % block
    q, k, v = (F.pad(t, (0, 0, 0, padding)).unflatten(2, (-1, block)) for t in (q, k, v))
    rows = q.unflatten(1, (-1, group)).transpose(2, 3).flatten(3, 4)  # [B, H_kv, N, G C, m]
    ends = state.unsqueeze(2) + (k.transpose(-1, -2) @ v).cumsum(dim=2)
    before = torch.cat([state.unsqueeze(2), ends[:, :, :-1]], dim=2)
    mask = torch.ones(block, block, dtype=q.dtype, device=q.device).tril().repeat(group, 1)
    sums = rows @ before + (rows @ k.transpose(-1, -2) * mask) @ v
    sums = sums.unflatten(3, (group, block)).transpose(2, 3).flatten(1, 2)
    return sums.flatten(2, 3)[:, :, :num_tokens], ends[:, :, -1]


# -------------------------------------------------------------------------------------------------
# The far part of retrieval layers: the gated delta rule on what left the window.
#
#     S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T     per head of keys
#     o = (o_near + w q^T S) / (1 + w),   w = exp(c . q / sqrt(K) + d)     per head of queries
#
# after Yang et al. 2024, "Gated Delta Networks", eq. 10. Of the layer's own keys and queries, not
# rotated, k is softmax([k U, -k U]) and q softmax([q W, -q W]), both of unit length: the features
# of the relative part, which come closer to the source's attention than a linear map with silu. The
# gates are functions of the key and the value, which is all that is left of a token when it leaves
# the window.


#: At the start beta = sigmoid(-2) = 0.12 and a = sigmoid(7) = 0.999.
INITIAL_BETA, INITIAL_KEEP = -2.0, 7.0


class DeltaFar(FarMaps):
    """See the module's docstring."""

    initial_scale = -2.0

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, features: int) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, features)
        #: Of beta and of the decay, from key and value.
        self.gates = nn.Parameter(torch.empty(num_kv_heads, 2 * head_dim, 2))
        self.gate_bias = nn.Parameter(torch.empty(num_kv_heads, 2))
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """See `FarMaps`; the gates depend on nothing."""
        super().init_weights()
        self.gates.zero_()
        self.gate_bias.copy_(torch.tensor([INITIAL_BETA, INITIAL_KEEP]).expand_as(self.gate_bias))

    def features(self, x: Tensor, weight: Tensor) -> Tensor:
        """[B, heads, T, K] by [heads, K, m / 2] to [B, heads, T, m] of unit length."""
        return F.normalize(signed_softmax((x @ weight.to(x.dtype)).float()), dim=-1)

    def gate_logits(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of beta and of the decay, each [B, H_kv, T]."""
        logits = torch.cat([k, v], dim=-1) * k.shape[-1] ** -0.5 @ self.gates.to(k.dtype)
        beta, keep = (logits.float() + self.gate_bias.unsqueeze(1)).unbind(dim=-1)
        return beta, keep

    def empty_state(self, rows: int) -> Tensor:
        """S: zeros [rows, H_kv, m, K]."""
        num_kv_heads, width, half = self.key_map.shape
        return self.key_map.new_zeros(rows, num_kv_heads, 2 * half, width)

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gives w q^T S [B, H, T, K], w [B, H, T, 1] and the state, as `RelativeFar.chunk`.

        A token that is not kept changes nothing, and w is 0 as long as none was.
        """
        group = q.shape[1] // k.shape[1]
        beta, keep_logit = self.gate_logits(k, v)
        # Not sigmoid, which rounds differently at the end of a vector loop.
        beta = F.logsigmoid(beta).exp() * keep.squeeze(-1)
        log_decay = F.logsigmoid(keep_logit) * keep.squeeze(-1)
        keys = self.features(k, self.key_map)
        # Every head of queries has its own copy of the state of its group.
        repeated = (
            t.repeat_interleave(group, dim=1) for t in (keys, v.float(), beta, log_decay, state)
        )
        keys, v, beta, log_decay, state = repeated
        queries = self.features(q, self.query_map)
        read, state = delta_chunk(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            v.transpose(1, 2),
            beta.transpose(1, 2),
            log_decay.transpose(1, 2),
            state,
        )
        weight = far_weight(q, self.scale, self.bias) * keep
        return weight * read.transpose(1, 2), weight, state[:, ::group]


# -------------------------------------------------------------------------------------------------
# Llama (Touvron et al. 2023, arXiv 2302.13971), and what differs from it by options of attention.
#
# Every layer is `model.architectures.decoder` and a SwiGLU. In a model of constant state
# the past of a layer is its window, and a far part has what left it.


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
