"""Linear Transformer: ``phi(x) = elu(x) + 1`` (Katharopoulos et al. 2020, eq. 7).

    o_t = phi(q_t)^T S_t / (phi(q_t)^T z_t + 1e-6)

No scaling of q and k, as in the paper. State per layer: S [H, K, V], z [H, K].
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from model.attention.linear import EPSILON, LinearAttention


class EluAttention(LinearAttention):
    """See the module's docstring. Options: ``denominator``, ``rotary``, ``rope_theta``."""

    def features(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1.0

    def denominator(self, den: Tensor) -> Tensor:
        return den + EPSILON
