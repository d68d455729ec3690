"""Taylor kernels: ``1 + q^ . k^``, and of second order ``1 + q^ . k^ + (q^ . k^)^2 / 2``.

    o_t = (sum_j v_j + q^_t . sum_j k^_j v_j^T) / (t + q^_t . sum_j k^_j)

(Li et al. 2020, "Linear Attention Mechanism: An Efficient Attention for
Semantic Segmentation", eq. 13). In the general form: features [1, x / |x|], so
the first row of S is the sum of the values and the first of z the count.

Option ``order`` 2 has a further feature for each two channels (Arora et al. 2024, "Simple linear
attention language models balance the recall-throughput tradeoff", section 4.1), with

    (q . k)^2 / 2 = sum_i q_i^2 k_i^2 / 2 + sum_{i < j} q_i q_j k_i k_j

Its weights are at least 1/2 for q and k of any length; without option ``unit_length`` these are
scaled by K^-1/4 each. ``key_dim`` is K, as wide as a value where it is 0: the state grows with
its square.

Rotating before the map keeps norms, so here, unlike elsewhere, it is relative.
State per layer: S [H, F, V], z [H, F], F = K + 1, or 1 + K + K (K + 1) / 2 for order 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from model.attention.linear import EPSILON, LinearAttention


class CosineAttention(LinearAttention):
    """See the module's docstring.

    Options: ``order``, ``unit_length``, ``key_dim``, ``denominator``, ``rotary``, ``rope_theta``.
    """

    def features(self, x: Tensor) -> Tensor:
        if self.options["unit_length"]:
            x = F.normalize(x, dim=-1, eps=EPSILON)
        else:
            x = x * self.key_width**-0.25
        one = F.pad(x, (1, 0), value=1.0)
        return torch.cat([one, products(x)], dim=-1) if self.options["order"] == 2 else one


def products(x: Tensor) -> Tensor:
    """Of [..., K] the x_i^2 / sqrt(2), then the x_i x_j of i < j: [..., K (K + 1) / 2]."""
    dim = x.shape[-1]
    crossed = [x[..., : dim - gap] * x[..., gap:] for gap in range(1, dim)]
    return torch.cat([x.square() * math.sqrt(0.5), *crossed], dim=-1)
