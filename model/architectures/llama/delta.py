"""The far part of retrieval layers: the gated delta rule on what left the window.

    S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T     per head of keys
    o = (o_near + w q^T S) / (1 + w),   w = exp(c . q / sqrt(K) + d)     per head of queries

after Yang et al. 2024, "Gated Delta Networks", eq. 10. Of the layer's own keys and queries, not
rotated, k is softmax([k U, -k U]) and q softmax([q W, -q W]), both of unit length: the features of
the relative part, which come closer to the source's attention than a linear map with silu. The
gates are functions of the key and the value, which is all that is left of a token when it leaves
the window.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.llama.relative import FarMaps, far_weight, signed_softmax
from model.ops.delta import delta_chunk

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
        beta = beta.sigmoid() * keep.squeeze(-1)
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
