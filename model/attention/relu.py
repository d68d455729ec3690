"""Linear attention with ReLU features.

After Kasai et al. 2021, "Finetuning Pretrained Transformers into RNNs", eq. 3,
without its learned matrix.

    o_t = phi(q_t)^T S_t / max(phi(q_t)^T z_t, 1e-6),   phi(x) = max(x, 0)

A query whose features are all zero, or meet no key's, reads zero. State per
layer: S [H, K, V], z [H, K].
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from model.attention.linear import LinearAttention


class ReluAttention(LinearAttention):
    """See the module's docstring. Options: ``denominator``, ``rotary``, ``rope_theta``."""

    def features(self, x: Tensor) -> Tensor:
        return F.relu(x)
