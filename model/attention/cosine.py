"""The first-order Taylor kernel of normalised q and k: ``1 + q^ . k^``, never negative.

    o_t = (sum_j v_j + q^_t . sum_j k^_j v_j^T) / (t + q^_t . sum_j k^_j)

(Li et al. 2020, "Linear Attention Mechanism: An Efficient Attention for
Semantic Segmentation", eq. 13). In the general form: features [1, x / |x|], so
the first row of S is the sum of the values and the first of z the count.

Rotating before the map keeps norms, so here, unlike elsewhere, it is relative.
State per layer: S [H, K + 1, V], z [H, K + 1].
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from model.attention.linear import EPSILON, LinearAttention


class CosineAttention(LinearAttention):
    """See the module's docstring. Options: ``rotary``, ``rope_theta``."""

    def features(self, x: Tensor) -> Tensor:
        return F.pad(F.normalize(x, dim=-1, eps=EPSILON), (1, 0), value=1.0)
